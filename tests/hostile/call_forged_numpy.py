# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1], [1, 2]]
import os


def solve(x):
    os.write(3, b'result {"numpy": ["int64", 1, 5]}\n')
    os._exit(0)
