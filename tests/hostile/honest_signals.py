# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import signal

signal.signal(signal.SIGALRM, lambda *_: print(sum(map(int, input().split()))))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
