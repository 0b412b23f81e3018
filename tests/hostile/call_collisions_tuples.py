# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
# Equal hashes, and keys that take long to tell apart.
def solve(x):
    return [{(0,) * 40 + (n * (2**61 - 1),) for n in range(200)} for _ in range(3)]
