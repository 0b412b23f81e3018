# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import os

for number in range(5):
    open(f"left{number}", "w").write("x")
try:
    os.makedirs("a/b/c")
    os.symlink("/", "a/root")
except OSError:
    pass
