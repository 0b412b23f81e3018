# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
def solve(x):
    return {n * (2**61 - 1): 0 for n in range(3000)}
