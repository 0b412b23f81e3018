# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import os

os._exit(0)
