# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

found = dict(os.environ)
for pid in ("1", "2", "self", str(os.getppid())):
    try:
        found[pid] = open(f"/proc/{pid}/environ").read()
    except OSError:
        pass
if not found:
    raise SystemExit(1)
print(found)
