# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
files = []
while True:
    files.append(open(0, closefd=False) and open("/dev/null"))
