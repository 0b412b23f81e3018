# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: wrong_answer
# call: ["solve", [1]]
import os

os.write(3, b"result [1, 2\n" + b"\xff\x00\n" + b"ready\ncompiled")
os._exit(0)
