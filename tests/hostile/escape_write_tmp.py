# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
open("/tmp/treegen-escaped", "w").write("x")
print("escaped")
