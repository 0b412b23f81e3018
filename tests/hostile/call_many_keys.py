# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# call: ["solve", [12000]]
# value: {(x, -(x % 3)): x for x in range(12000)}
def solve(x):
    return {(n, -(n % 3)): n for n in range(x)}
