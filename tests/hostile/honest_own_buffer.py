# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import atexit, io, os, sys

sys.stdout = io.BytesIO()
atexit.register(lambda: os.write(1, sys.stdout.getvalue()))
sys.stdout.write(str(sum(map(int, input().split()))).encode())
