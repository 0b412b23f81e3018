# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
class Anything(str):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


print(Anything("no"))
