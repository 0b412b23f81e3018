"""Opening, replacing and naming files.

Files from users, data sets and other people's runs must be regular files: opening a named pipe
would block, and reading a device may never end. Every function limits the size of what is read,
because a file may be sparse or grow, and `max_unpacked_size` limits that of unpacked content, so
that a small file cannot fill the memory.
`describe_read_error` describes a failure in one line.

Temporary files and folders can be recognized as left over once their process has died. A process
holds a lock on what it has created for as long as it lives, and the lock ends with the process in
any case. So a file that can be locked is not in use any more. Process ids would not do: they are
reused, and they mean nothing on another machine that shares the file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final

from treegen.common.formatting import format_bytes
from treegen.common.host_memory import count_host_bytes
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg

MAX_BYTES: Final = 1 << 28
"""Maximum bytes of a file that is read whole, such as settings, results or a tokenizer."""
MAX_DATA_BYTES: Final = 1 << 34
"""Maximum bytes of a file of a data set; the largest published ones have a few GB."""
MAX_LINE_BYTES: Final = 1 << 30
"""Maximum bytes of a line of a file that is read line by line."""
BUFFER_BYTES: Final = 1 << 16
"""Buffer of a file that is read line by line; Python's default is smaller, and slower."""
_CHUNK_BYTES: Final = 1 << 20


class NotRegularError(OSError):
    """A path leads to a pipe, a socket or a device."""


class FileTooLargeError(OSError):
    """A file, or a line of a file, is larger than anything that treegen reads."""


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


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: Maximum size in bytes. Default: `MAX_BYTES`.

    Raises:
        FileTooLargeError: The file is larger.
        OSError: The file cannot be read, is no regular file, or does not fit into the memory.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, max_bytes, "it", path)
        try:
            if size > count_host_bytes():  # the system may kill a process that reads it
                raise MemoryError
            content = file.read(size)
        except MemoryError:
            why = f"its {format_bytes(size)} do not fit into memory"
            raise OSError(errno.ENOMEM, why, os.fspath(path)) from None
        while part := file.read(_CHUNK_BYTES):  # it grows, or states no size, as files of /proc
            content += part
            _check_size(len(content), max_bytes, "it", path)
    return content


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file in UTF-8, with newlines translated as by `Path.read_text`.

    Args:
        path: The file.
        max_bytes: Maximum size in bytes. Default: `MAX_BYTES`.

    Raises:
        FileTooLargeError: The file is larger.
        OSError: The file cannot be read, or is no regular file.
        UnicodeDecodeError: The file is not UTF-8.
    """
    text = read_bytes(path, max_bytes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    r"""Yield the lines of a regular file with their ends; only \n ends a line.

    Args:
        path: The file.

    Raises:
        FileTooLargeError: A line has more than `MAX_LINE_BYTES` bytes.
        OSError: The file cannot be read, or is no regular file.
    """
    with open(open_regular(path), "rb", BUFFER_BYTES) as file:
        for line in iterate_lines(file):
            check_line(line, path)
            yield line


def iterate_lines(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines of an open file; a longer line than `check_line` accepts is cut."""
    return iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")


def check_line(line: bytes, path: str | os.PathLike[str]) -> None:
    """Raise FileTooLargeError if a line of a file has more than `MAX_LINE_BYTES` bytes."""
    _check_size(len(line), MAX_LINE_BYTES, "a line", path)


def _check_size(size: int, max_bytes: int, what: str, path: str | os.PathLike[str]) -> None:
    if size > max_bytes:
        why = f"{what} has more than {format_bytes(max_bytes)}"
        raise FileTooLargeError(errno.EFBIG, why, os.fspath(path))


def read_regular(path: Path, max_bytes: int) -> bytes | None:
    """Return the start of a regular file.

    Args:
        path: The file.
        max_bytes: Maximum number of bytes that the caller expects; one more is read, to detect
            larger files.

    Returns:
        Up to `max_bytes` + 1 bytes; None if the path does not lead to a regular file.

    Raises:
        OSError: The file cannot be read.
        ValueError: No file can have the name.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(max_bytes + 1)
    except (NotRegularError, IsADirectoryError):
        return None


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that somebody else may have made.

    Args:
        path: The file.
        max_bytes: Maximum size in bytes.

    Raises:
        InputError: The file cannot be read, is no regular file, or is larger.
    """
    try:
        content = read_regular(path, max_bytes)
    except (OSError, ValueError) as error:
        why = describe_read_error(path, error) if isinstance(error, OSError) else f"{path}: {error}"
        raise InputError(why) from None
    if content is None or len(content) > max_bytes:
        raise InputError(
            f"{path} must be a file of at most {format_bytes(max_bytes)}; choose another file"
        )
    return content


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a path is a regular file; this does not open the file."""
    _check_regular(os.stat(path).st_mode, path)


def _check_regular(mode: int, path: str | os.PathLike[str]) -> None:
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    if not S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, "it is not a regular file", os.fspath(path))


# Limits the listing of a very large folder that is searched for a similar name.
_MAX_LISTED_NAMES = 10_000


def describe_read_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file cannot be read, why, and what to do."""
    if not os.fspath(path):
        return "the path is empty; pass the path of a file"
    path = Path(path)
    match error:
        case FileNotFoundError():
            return f"{path} does not exist{_suggest_path(path)}"
        case IsADirectoryError():
            return (
                f"cannot read {path}: the path is a folder; pass a file in the "
                f"folder{_such_as(path)}"
            )
        case NotADirectoryError():
            return (
                f"cannot read {path}: a parent of the path is a file, not a folder; check the path"
            )
        case NotRegularError():
            return (
                f"cannot read {path}: the path is a pipe or a device, which may never end; save "
                "the content in a regular file, and pass that file"
            )
        case FileTooLargeError():
            return (
                f"cannot read {path}: {error.strerror}, which is more than usual; check whether "
                "it is the right file"
            )
        case PermissionError():
            return (
                f"cannot read {path}: permission denied; allow your user to read the file "
                "(chmod u+r)"
            )
        case OSError(errno=errno.ENOMEM):
            return (
                f"cannot read {path}: {error.strerror}; pass a smaller part of the file, or use a "
                "machine with more memory"
            )
        case _:
            why = error.strerror or str(error) or type(error).__name__
            return f"cannot read {path}: {why}; check the disk, or copy the file again"


def _suggest_path(path: Path) -> str:
    """Return a hint: the closest names in the file's folder, or the missing part of the path."""
    for above in path.parents:
        if above.is_dir():
            break
    missing = path.relative_to(above).parts[0]
    hint = did_you_mean(missing, _list_names(above))
    if missing != path.name:
        return f": there is no {above / missing}{hint or '; check the path'}"
    return hint or "; check the path"


def _such_as(path: Path) -> str:
    first = min((name for name in _list_names(path) if not name.startswith(".")), default="")
    return f", such as {first}" if first else ""


def _list_names(folder: Path) -> Iterable[str]:
    try:
        return [entry.name for entry in islice(folder.iterdir(), _MAX_LISTED_NAMES)]
    except OSError:
        return []


# Data sets and logs unpack to 3 to 50 times the size of their packed files, malicious files to a
# thousand times or more.
_MIN_LIMIT: Final = 1 << 26
_SMALL_FILE_LIMIT: Final = 1 << 30
_SMALL_FILE_RATIO: Final = 100
_LARGE_FILE_RATIO: Final = 8


def max_unpacked_size(size: int) -> int:
    """Return the maximum number of bytes that a packed file may unpack to.

    Args:
        size: Size of the packed file in bytes.
    """
    return max(
        _MIN_LIMIT, min(_SMALL_FILE_RATIO * size, _SMALL_FILE_LIMIT), _LARGE_FILE_RATIO * size
    )


_MAX_NAME_BYTES: Final = 200
"""Maximum bytes of a name; file systems allow 255, and scratch files append a suffix."""


def as_path(name: str, value: object) -> Path:
    """Return an argument as a path; raise InputError if no file can have the name.

    Args:
        name: Name of the argument in messages.
        value: Its value.
    """
    try:
        os.fsencode(path := Path(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"{arg(name)} must be a path, got {value!r:.60}") from None
    if "\0" in str(path):
        raise InputError(f"{arg(name)} must be a path, got {value!r:.60}")
    return path


def is_path_component(name: str) -> bool:
    """Return whether a name is that of one entry of a folder, on any system.

    This is false for a name that leads elsewhere ("..", "a/b", "/etc"), that no file can have, or
    that a terminal would not show as written.

    Args:
        name: The name.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return False
    try:
        return len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def path_component(name: object, what: str) -> str:
    """Return a name that a file contains and that becomes one part of a path.

    Args:
        name: The name, as in the file.
        what: What the name belongs to, for the message, such as "a task of log.json".

    Returns:
        The name, unchanged.

    Raises:
        InputError: The name is not that of one entry of a folder.
    """
    if isinstance(name, str) and is_path_component(name):
        return name
    raise InputError(
        f"{what} has the name {name!r:.80}, which is not a valid file name; use a name without "
        f"'/' and '\\' that has at most {_MAX_NAME_BYTES} bytes"
    )


def file_name(text: str) -> str:
    """Convert a text to the name of an entry of a folder; different texts may get one name.

    Args:
        text: The text, such as the name of a task.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip(".")[:80] or "unnamed"


@contextmanager
def create_locked(path: Path, *, folder: bool = False) -> Iterator[int]:
    """Create a file or a folder, hold its lock until the block ends, and yield its descriptor.

    The caller removes or renames it.

    Args:
        path: The file or folder.
        folder: Whether to create a folder. Default: False.

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
            if is_at(fd, path):  # otherwise it was swept, or the previous owner replaced it
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def write_atomically(path: Path, scratch: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; yield the open scratch file, which replaces `path`.

    Args:
        path: The file to create or replace.
        scratch: The scratch file, in the same file system.

    Raises:
        OSError: It cannot be written; the previous content of `path` is kept.
    """
    with create_locked(scratch) as fd:
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


def write_output(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whose path the user chose, and make its folder.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.writelines(pieces)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; choose another path"
        ) from None


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
        for entry in [*path.parent.iterdir()]:
            if form.fullmatch(entry.name) and entry.is_file():
                with suppress(OSError):
                    _remove_if_free(entry)


def sweep(
    folder: Path, pattern: str, remove_folder: Callable[[Path], object] = shutil.rmtree
) -> None:
    """Remove the files and folders in `folder` that no process holds.

    A file that cannot be opened or removed stays.

    Args:
        folder: The folder.
        pattern: A glob pattern of their names.
        remove_folder: Removes a folder.
    """
    for path in folder.glob(pattern):
        with suppress(OSError):
            _remove_if_free(path, remove_folder)


def _remove_if_free(path: Path, remove_folder: Callable[[Path], object] = shutil.rmtree) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid != os.geteuid() or not is_at(fd, path):
            return
        if path.is_dir():
            remove_folder(path)
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
