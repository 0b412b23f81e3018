# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import os

for handle in range(3, 1024):
    for data in (b'{"status": 0, "cpu": 0, "wall": 0, "memory": 0, "killed": null}', b"accepted"):
        try:
            os.write(handle, data)
        except OSError:
            break
    try:
        print(os.read(handle, 4096))
    except OSError:
        pass
