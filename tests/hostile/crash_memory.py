# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes

ctypes.string_at(0)
