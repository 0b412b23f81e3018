# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import functools, sys

sys.setrecursionlimit(10**6)


@functools.lru_cache(None)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


depth(10000)
print(sum(map(int, input().split())))
