"""Opens files from users, data sets and other people's runs, which must be regular files.

Opening a named pipe would block, and reading a device may never end, so both are errors.
`read_regular` limits the size of what is read, and `most_unpacked` that of unpacked content, so
that a small file cannot fill the memory. `describe_read_error` describes a failure in one line.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final

from treegen.common.spelling import did_you_mean


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


# Limits the listing of a very large folder that is searched for a similar name.
_MOST_NAMES = 10_000


def describe_read_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file cannot be read, why, and what to do."""
    path = Path(path)
    match error:
        case FileNotFoundError():
            return f"{path} does not exist{_like(path)}"
        case IsADirectoryError():
            return f"cannot read {path}: it is a folder; name a file in it{_such_as(path)}"
        case NotADirectoryError():
            return f"cannot read {path}: a part of the path is a file; check the path"
        case NotRegularError():
            return (
                f"cannot read {path}: it is no regular file but a pipe or device, which may never "
                "end; save its content in a file and name that"
            )
        case PermissionError():
            return f"cannot read {path}: permission denied; let your user read it (chmod u+r)"
        case _:
            why = error.strerror or str(error) or type(error).__name__
            return f"cannot read {path}: {why}; check the disk, or copy the file again"


def _like(path: Path) -> str:
    """Return a hint: the closest names in the file's folder, or the missing part of the path."""
    for above in path.parents:
        if above.is_dir():
            break
    missing = path.relative_to(above).parts[0]
    hint = did_you_mean(missing, _names(above))
    if missing != path.name:
        return f": there is no {above / missing}{hint or '; check the path'}"
    return hint or "; check the path"


def _such_as(path: Path) -> str:
    first = min((name for name in _names(path) if not name.startswith(".")), default="")
    return f", such as {first}" if first else ""


def _names(folder: Path) -> Iterable[str]:
    try:
        return [each.name for each in islice(folder.iterdir(), _MOST_NAMES)]
    except OSError:
        return []


# Data sets and logs unpack to 3 to 50 times the size of their packed files, malicious files to a
# thousand times or more.
_LEAST: Final = 1 << 26
_MOST: Final = 1 << 30
_TIMES: Final = 100
_TIMES_LARGE: Final = 8


def most_unpacked(size: int) -> int:
    """Return the maximum number of bytes that a packed file may unpack to.

    Args:
        size: Size of the packed file in bytes.
    """
    return max(_LEAST, min(_TIMES * size, _MOST), _TIMES_LARGE * size)
