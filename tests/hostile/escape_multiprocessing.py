# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
from multiprocessing import get_context

process = get_context("fork").Process(target=print)
process.start()
process.join()
