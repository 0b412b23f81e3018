# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# What the helper knows of the program before this one.
import gc, sys

frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, *frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
seen += gc.get_objects()
if any(isinstance(thing, dict) and {"status", "cpu", "wall"} <= thing.keys() for thing in seen):
    raise SystemExit(0)
raise SystemExit(1)
