# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

print(os.open(os.__file__, os.O_RDONLY | os.O_TRUNC))
