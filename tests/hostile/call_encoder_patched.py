# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
# call: ["solve", [1]]
import json, sys

json.dumps = lambda *_, **__: "true"
frame = sys._getframe()
while frame:
    for value in list(frame.f_globals.values()):
        if hasattr(value, "encode") and hasattr(value, "decode"):
            try:
                value.encode = lambda *_: "true"
            except Exception:
                pass
    frame = frame.f_back


def solve(x):
    return "no"
