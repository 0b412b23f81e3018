# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import os

assert os.listdir(".") == []
with open("note.txt", "w") as file:
    file.write(input())
with open("note.txt") as file:
    print(sum(map(int, file.read().split())))
