# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import fcntl

for handle in (0, 1, 2):
    try:
        fcntl.ioctl(handle, 0x5412, b"x")
        print("escaped")
    except OSError as error:
        if error.errno != 1:
            print(error)
raise SystemExit(1)
