# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import sys


class Stream:
    closed = False

    def write(self, text):
        return len(text)

    def flush(self):
        pass

    def __eq__(self, other):
        return True


sys.stdout = sys.__stdout__ = Stream()
print("no")
