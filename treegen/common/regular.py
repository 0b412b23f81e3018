"""Opening files that come from data or from runs of other people."""

import errno
import os
from pathlib import Path
from stat import S_ISREG


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file that may be somebody else's work; returns its descriptor.

    A pipe would be waited for, and a device may never end. What is written follows no link, which
    may lead to a file of the user's own.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def read_regular(path: Path, most: int) -> bytes | None:
    """Return what is in a file, up to `most` + 1 bytes of it; None where it is no regular file.

    A pipe would be waited for, and a device may never end.

    Raises:
        OSError: it cannot be read.
        ValueError: its name is none.
    """
    if not S_ISREG(path.stat().st_mode):  # some devices do things when they are opened
        return None
    # Another may be there by now; a pipe is not waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(most + 1) if S_ISREG(os.fstat(file.fileno()).st_mode) else None
