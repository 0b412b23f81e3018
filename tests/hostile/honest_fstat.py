# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import io, os

data = io.BytesIO(os.read(0, os.fstat(0).st_size))
print(sum(map(int, data.readline().split())))
