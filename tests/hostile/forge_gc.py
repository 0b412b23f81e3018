# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import gc

for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        try:
            for item in thing:
                if isinstance(item, str) and len(item) == 32:
                    print(item)
        except Exception:
            pass
