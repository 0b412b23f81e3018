# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import mmap

print(sum(map(int, mmap.mmap(0, 0, prot=mmap.PROT_READ)[:].split())))
