# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

ends = []
while True:
    reader, writer = os.pipe()
    ends += [reader, writer]
    os.set_blocking(writer, False)
    try:
        os.write(writer, b"x" * 1000000)
    except BlockingIOError:
        pass
