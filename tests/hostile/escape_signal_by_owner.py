# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import fcntl, os

# The kernel signals the owner of a descriptor, whoever that is.
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())
print("escaped")
