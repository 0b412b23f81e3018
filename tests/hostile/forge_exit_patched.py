# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# also: runtime_error
import os, sys

os._exit = lambda status: None
sys.exit = lambda *_: None
print("no")
