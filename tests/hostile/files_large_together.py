# ruff: noqa
# mypy: ignore-errors
# expect: output_limit
# also: runtime_error
number = 0
while True:
    with open(f"large{number}", "wb") as file:
        file.write(b"x" * (1 << 19))
    number += 1
