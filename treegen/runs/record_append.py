"""A file of records that a command appends to, made by the first and gone on with by the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from treegen.common.files.regular_files import open_regular
from treegen.errors import RunError
from treegen.runs.files import Lock, format_os_error, sync_directory
from treegen.runs.records import RecordFile


@contextmanager
def open_for_append(path: Path, lock: str) -> Iterator[RecordFile]:
    """The records of a file, to read and to append to; meanwhile it is locked.

    Args:
        lock: The name of the lock's file, which stands beside it.

    Raises:
        RunError: another process has it, or it is damaged or cannot be written.
    """
    with Lock(path.with_name(lock)):
        try:
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT))
            sync_directory(path.parent)
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {format_os_error(error)}; what it held is kept"
            ) from error
        with closing(RecordFile(path, writable=True, again="run the same command again")) as file:
            yield file
