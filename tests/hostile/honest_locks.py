# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import fcntl, sqlite3

with open("numbers", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_UN)
table = sqlite3.connect("table.db")
table.execute("pragma journal_mode = memory")
table.execute("create table numbers (n int)")
table.executemany("insert into numbers values (?)", [(n,) for n in input().split()])
table.commit()
print(table.execute("select sum(n) from numbers").fetchone()[0])
