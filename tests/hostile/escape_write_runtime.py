# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

with open(os.path.dirname(os.__file__) + "/treegen_escaped.py", "w") as file:
    file.write("x")
print("escaped")
