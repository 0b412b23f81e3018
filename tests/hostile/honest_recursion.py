# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import functools, sys

sys.setrecursionlimit(10**6)


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


@functools.lru_cache(None)
def cached(n):  # takes C stack, of which Python 3.12 allows less
    return 0 if n == 0 else 1 + cached(n - 1)


print(depth(50000) - 50000 + cached(300) - 300 + sum(map(int, input().split())))
