# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: timeout
import threading, time

threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
