# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import dataclasses, pickle, typing


@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: typing.Optional[int] = None


point = pickle.loads(pickle.dumps(Point(*map(int, input().split()))))
exec("print(point.x + point.y)")
