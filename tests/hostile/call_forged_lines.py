# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
import os


def solve(x):
    os.write(3, b"result true\nresult null\naccepted\n")
    return "no"
