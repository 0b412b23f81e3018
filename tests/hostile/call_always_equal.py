# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
class Anything(list):
    def __eq__(self, other):
        return True


def solve(x):
    return Anything([x])
