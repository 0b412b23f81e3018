# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import os, sys, platform, tempfile, getpass, locale, time

os.environ.get("HOME"), os.cpu_count(), platform.machine(), sys.argv[0], time.localtime()
print(sum(map(int, input().split())))
