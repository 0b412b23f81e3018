"""A file of records that several commands append to, one after another; the first creates it."""

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
    """Open a file of records to read and to append; it is locked meanwhile.

    Args:
        path: The file, which is created if it does not exist.
        lock: Name of the lock file in the same directory.

    Yields:
        The records.

    Raises:
        RunError: another process holds the lock, or the file is damaged or cannot be written.
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
