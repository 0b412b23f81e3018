# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
import sys

sys.setrecursionlimit(1 << 30)


class A:
    def __repr__(self):
        return repr([self])[1:] + ""


class B:
    pass


for _ in range(10**6):
    B = [B]
repr(B)
