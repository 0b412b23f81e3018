# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import os

os.write(3, b"ready\ncompiled\nresult true\naccepted\n")
print("no")
os._exit(0)
