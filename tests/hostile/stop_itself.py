# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import os, signal

os.kill(os.getpid(), signal.SIGSTOP)
