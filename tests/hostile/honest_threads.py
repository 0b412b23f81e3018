# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import sys, threading

sys.setrecursionlimit(10**6)
threading.stack_size(64 << 20)


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


def main():
    print(depth(50000) - 50000 + sum(map(int, input().split())))


thread = threading.Thread(target=main)
thread.start()
thread.join()
