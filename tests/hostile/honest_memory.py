# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
x = bytearray(150 << 20)
x[::4096] = b"x" * len(x[::4096])
print(sum(map(int, input().split())))
