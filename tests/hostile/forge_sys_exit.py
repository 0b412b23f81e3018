# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import sys

sys.exit(0)
