# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: ""
# answer: ""
# call: ["solve", [1]]
# value: (1, [1.5, None, True, chr(0xE9)], {1: {2, 3}}, -(2**100))
def solve(x):
    return (x, [1.5, None, True, "\u00e9"], {1: {2, 3}}, -(2**100))
