# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import resource, signal, time

signal.setitimer(signal.ITIMER_PROF, 0)
time.time = time.monotonic = time.perf_counter = time.process_time = lambda: 0
try:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1 << 40))
except (OSError, ValueError):
    pass
while True:
    pass
