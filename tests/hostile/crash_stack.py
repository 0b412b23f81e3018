# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
import sys

sys.setrecursionlimit(1 << 30)


class A:
    def __getattr__(self, name):
        return getattr(self, name)


A().x
