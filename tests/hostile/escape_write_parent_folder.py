# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
open("../treegen-escaped", "w").write("x")
print("escaped")
