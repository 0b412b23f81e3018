# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# also: runtime_error
import ctypes, re, sys

# The whole heap near the objects that we know of, not only what gc shows.
start = id(sys) & ~0xFFFFF
text = ctypes.string_at(start, 1 << 20)
for match in re.findall(rb"[0-9a-f]{32}", text)[:500]:
    print(match.decode())
