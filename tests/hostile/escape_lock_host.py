# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# A lock on a file of the host makes others wait for as long as the program likes.
import fcntl, os

first, second = (os.open(os.__file__, os.O_RDONLY) for _ in range(2))
fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
try:
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    raise SystemExit(0)  # the first one is real
raise SystemExit(1)
