# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
open("/dev/shm/treegen-escaped", "w").write("x")
print("escaped")
