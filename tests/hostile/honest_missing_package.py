# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
for name in ("pip", "setuptools", "torch", "treegen", "no_such_package"):
    try:
        __import__(name)
    except ImportError:
        pass
print(sum(map(int, input().split())))
