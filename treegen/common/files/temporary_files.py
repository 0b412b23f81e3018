"""Temporary files and folders that are known to be left over once their process has died.

A process holds a lock on what it has made for as long as it lives. The lock ends with the process,
however that ends. So a file that can be locked belongs to nobody any more. Process ids would not
do: they are used again, and they mean nothing on another machine that shares the file system.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def create_held(path: Path, *, folder: bool = False) -> Iterator[int]:
    """Make a file, or a folder, and hold it meanwhile; yields its descriptor.

    The caller removes or renames it.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        if folder:
            path.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # it was swept
                continue
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):  # on a file system without locks nothing is ever swept
                fcntl.flock(fd, fcntl.LOCK_EX)
            if is_at(fd, path):  # otherwise it was swept, or its former holder replaced it
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def write_atomically(path: Path, scratch: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; yields `scratch`, which takes the place of `path` at last.

    Raises:
        OSError: it cannot be written; what `path` held is kept.
    """
    with create_held(scratch) as fd:
        try:
            os.ftruncate(fd, 0)
            with open(fd, "wb", closefd=False) as file:
                yield file
            os.fsync(fd)
            os.replace(scratch, path)
        except BaseException:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; what processes that were killed have left of it is removed.

    Raises:
        OSError: it cannot be written; what `path` held is kept.
    """
    sweep_scratch(path)
    with write_atomically(path, path.with_name(f"{path.name}.{os.getpid()}.tmp")) as file:
        yield file


def sweep_scratch(path: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left of it.

    Args:
        path: the file. Only regular files beside it are removed whose names are its own and a
            process id, such as `results.json.123.tmp` (older versions wrote `results.123.tmp`),
            and only those that no process holds.
    """
    names = [path.name, path.stem] if path.suffix == ".json" else [path.name]
    form = re.compile(rf"({'|'.join(map(re.escape, names))})\.[0-9]+\.tmp")
    with suppress(OSError):
        for each in [*path.parent.iterdir()]:
            if form.fullmatch(each.name) and each.is_file():
                with suppress(OSError):
                    _remove_if_free(each)


def sweep(folder: Path, pattern: str) -> None:
    """Remove the files and folders in `folder` that no process holds.

    A file that cannot be opened or removed stays.

    Args:
        pattern: A glob pattern of their names.
    """
    for path in folder.glob(pattern):
        with suppress(OSError):
            _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid != os.geteuid() or not is_at(fd, path):
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(fd)


def is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
