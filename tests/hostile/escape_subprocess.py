# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import subprocess

print(subprocess.check_output(["/bin/sh", "-c", "id"]))
