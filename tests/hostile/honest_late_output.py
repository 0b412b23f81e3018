# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import os

out = os.fdopen(1, "w")
out.write(str(sum(map(int, input().split()))))  # never closed
