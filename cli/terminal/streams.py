"""Guards for standard streams, which may be closed, full, or without a reader.

Progress goes to stderr. If it cannot be written it is dropped, because progress must never end a
run. Results go to stdout. If they cannot be written, one line says so.
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
    """Guard stdout and stderr while the context is open."""
    before = sys.stdout, sys.stderr
    _open_closed()
    sys.stdout = cast(TextIO, _Guarded(sys.stdout or _nowhere(), _refuse))
    sys.stderr = cast(TextIO, _Guarded(sys.stderr or _nowhere(), _lose))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Guarded:
    """A text stream.

    Args:
        on_error: Called with the stream and the error if a write fails.
    """

    def __init__(self, stream: TextIO, on_error: Callable[[TextIO, OSError], None]) -> None:
        self._stream, self._on_error = stream, on_error

    def write(self, text: str | bytes) -> int:
        if not text:  # click first writes an empty text, and ignores errors
            return 0
        if isinstance(text, bytes):  # click writes shell completions as bytes
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
        if name == "buffer":  # with a buffer click would bypass the guard
            raise AttributeError(name)
        return getattr(self._stream, name)


def _refuse(stream: TextIO, error: OSError) -> None:
    _lose(stream, error)
    if error.errno == errno.EPIPE:  # for example `treegen ... | head`; click then exits silently
        raise error
    raise RunError(
        f"cannot write to stdout: {(error.strerror or str(error)).lower()}; what a run has done is "
        "in its directory all the same"
    ) from error


def _lose(stream: TextIO, error: OSError) -> None:
    """Point the stream's descriptor to /dev/null, so that text in its buffer raises no error."""
    with suppress(OSError, ValueError):
        fd = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(fd, stream.fileno())
        finally:
            os.close(fd)


def _open_closed() -> None:
    """Open /dev/null for closed standard streams.

    Otherwise files of a run would get descriptors 1 and 2, to which libraries write.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
