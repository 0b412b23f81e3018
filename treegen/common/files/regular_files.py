"""Opens files from users, data sets and other people's runs, which must be regular files.

Opening a named pipe would block, and reading a device may never end, so both are errors.
`read_regular` limits the size of what is read.
"""

import errno
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG


class NotRegularError(OSError):
    """A path leads to a pipe, a socket or a device."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file.

    For writing, links are not followed, because a link may lead to a file of the user's own.

    Args:
        path: The file.
        flags: Flags of `os.open`.

    Returns:
        The file's descriptor.

    Raises:
        NotRegularError: The path leads to a pipe, a socket or a device.
        OSError: The file cannot be opened, is a folder, or is a link and would be written.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        _check_regular(os.stat(path).st_mode, path)  # before opening, which affects some devices
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(fd).st_mode, path)  # the path may lead to another file by now
    except OSError:
        os.close(fd)
        raise
    return fd


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read, or is no regular file.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file in UTF-8, with newlines translated as by `Path.read_text`.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        UnicodeDecodeError: The file is not UTF-8.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        return file.read()


def read_regular(path: Path, most: int) -> bytes | None:
    """Return the start of a regular file.

    Args:
        path: The file.
        most: Maximum number of bytes that the caller expects; one more is read, to detect larger
            files.

    Returns:
        Up to `most` + 1 bytes; None if the path does not lead to a regular file.

    Raises:
        OSError: The file cannot be read.
        ValueError: No file can have the name.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(most + 1)
    except (NotRegularError, IsADirectoryError):
        return None


def _check_regular(mode: int, path: str | os.PathLike[str]) -> None:
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    if not S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, "it is no regular file", os.fspath(path))
