"""Temporary files and folders that can be recognised as left over once their process has died.

A process holds a lock on what it has created for as long as it lives, and the lock ends with the
process in any case. So a file that can be locked is not in use any more. Process ids would not do:
they are reused, and they mean nothing on another machine that shares the file system.
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
    """Create a file or a folder, and hold its lock inside; yield its descriptor.

    The caller removes or renames it.

    Args:
        path: The file or folder.
        folder: Whether to create a folder.

    Raises:
        OSError: It cannot be created.
    """
    while True:
        if folder:
            path.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # another process swept it
                continue
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):  # without locks in the file system nothing is ever swept
                fcntl.flock(fd, fcntl.LOCK_EX)
            if is_at(fd, path):  # otherwise it was swept, or its previous holder replaced it
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def write_atomically(path: Path, scratch: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; yield `scratch`, which replaces `path` at the end.

    Raises:
        OSError: It cannot be written; the previous content of `path` is kept.
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
    """Write a file whole or not at all, and remove scratch files that killed processes have left.

    Raises:
        OSError: It cannot be written; the previous content of `path` is kept.
    """
    sweep_scratch(path)
    with write_atomically(path, path.with_name(f"{path.name}.{os.getpid()}.tmp")) as file:
        yield file


def sweep_scratch(path: Path) -> None:
    """Remove scratch files of a file that processes left when they were killed while writing it.

    Args:
        path: The file. Only regular files in its folder are removed whose names are its own and a
            process id, such as `results.json.123.tmp` (older versions wrote `results.123.tmp`), and
            only those that no process holds.
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
        folder: The folder.
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
