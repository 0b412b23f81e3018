"""Standard streams that may be closed, full, or read by nobody any more.

What a run prints while it works goes to stderr and is lost where it cannot be written: progress
never ends a run. Results go to stdout; where they cannot be written, one line says so.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from treegen.errors import RunError


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Put a guard before stdout and stderr meanwhile."""
    before = sys.stdout, sys.stderr
    _open_closed()
    sys.stdout = cast(TextIO, _Guarded(sys.stdout or _nowhere(), _refuse))
    sys.stderr = cast(TextIO, _Guarded(sys.stderr or _nowhere(), _lose))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Guarded:
    """A text stream; on_error is given what goes wrong in writing to it."""

    def __init__(self, stream: TextIO, on_error: Callable[[TextIO, OSError], None]) -> None:
        self._stream, self._on_error = stream, on_error

    def write(self, text: str | bytes) -> int:
        if not text:  # click tries this first, and takes no error seriously
            return 0
        if isinstance(text, bytes):  # as click writes what a shell completes
            text = text.decode()
        try:
            return self._stream.write(text)
        except OSError as error:
            self._on_error(self._stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._on_error(self._stream, error)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write past the guard
            raise AttributeError(name)
        return getattr(self._stream, name)


def _refuse(stream: TextIO, error: OSError) -> None:
    _lose(stream, error)
    if error.errno == errno.EPIPE:  # as of `treegen ... | head`, for click to end in silence
        raise error
    raise RunError(
        f"cannot write to stdout: {(error.strerror or str(error)).lower()}; what a run has done is "
        "in its directory all the same"
    ) from error


def _lose(stream: TextIO, error: OSError) -> None:
    """Lead the stream's descriptor nowhere, so that what it has not written yet is no error."""
    with suppress(OSError, ValueError):
        fd = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(fd, stream.fileno())
        finally:
            os.close(fd)


def _open_closed() -> None:
    """Take the places of closed streams, or files of a run would: libraries write to 1 and 2."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
