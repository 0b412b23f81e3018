# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import sys, gc

seen = []
frame = sys._getframe()
while frame:
    seen += [repr(frame.f_locals), repr(frame.f_globals)]
    frame = frame.f_back
for text in seen:
    sys.stdout.write(text[:5000])
