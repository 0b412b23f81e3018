# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
import os


def solve(x):
    os.write(3, b"result " + b"9" * 60000 + b"\n")
    return 1
