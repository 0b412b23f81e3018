# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import sys, threading

sys.settrace(lambda frame, *_: print(list(frame.f_locals.values())[:5]))
threading.settrace(lambda frame, *_: print(list(frame.f_locals.values())[:5]))
sys.setprofile(lambda frame, *_: None)
print("no")
