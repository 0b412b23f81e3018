# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os, sys

print(os.posix_spawn(sys.executable, ["python", "-V"], {}))
