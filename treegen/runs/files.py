"""Small files written whole or not at all, strict JSON, and the lock on a run directory."""

import errno
import fcntl
import json
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from treegen.common.files.read_errors import describe_read_error
from treegen.common.files.regular_files import open_regular
from treegen.common.files.temporary_files import is_at, replace_file
from treegen.errors import InputError, RunError, RunInUseError

# Some file systems cannot fsync a directory and say so with one of these. EACCES comes from a
# parent directory that may be searched but not read.
_NO_DIRECTORY_SYNC: Final = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES}


def to_json_value(value: object, name: str = "") -> Any:
    """Return `value` as JSON will give it back: dicts with str keys, lists, finite numbers, str.

    Paths become strings, and a float that is a whole number becomes an int, so that 1 and 1.0 are
    one setting.

    Raises:
        InputError: a value that JSON cannot hold; the message names it by its dotted path.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name or 'the value'} is {value}; JSON has finite numbers only")
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{name or 'the value'} has the key {key!r}; keys must be text")
        return {key: to_json_value(v, f"{name}.{key}" if name else key) for key, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_json_value(v, f"{name}[{i}]") for i, v in enumerate(value)]
    raise InputError(f"{name or 'the value'} is a {type(value).__name__}, which JSON cannot hold")


def check_id(problem_id: str) -> None:
    """Refuse an id that JSON would give back as another one.

    Raises:
        InputError: it is such an id.
    """
    # Two surrogates in a row come back as the one character they stand for.
    if not problem_id.isascii() and json.loads(json.dumps(problem_id)) != problem_id:
        raise InputError(f"the problem id {problem_id!r} has a surrogate pair; use the character")


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# parse_constant is only called for NaN, Infinity and -Infinity.
_decoder: Final = json.JSONDecoder(parse_constant=_no_constant)


def parse_json(text: str) -> Any:
    """Return the value of strict JSON `text`.

    Raises:
        ValueError: it is not strict JSON.
    """
    try:
        if text.startswith("{"):  # as records do, without a look for spaces around
            value, end = _decoder.raw_decode(text)
            if end == len(text):
                return value
        return _decoder.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value in the JSON file `path`.

    Raises:
        RunError: the file cannot be read, or is damaged.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return parse_json(file.read().decode())
    except OSError as error:
        raise RunError(describe_read_error(path, error)) from error
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); restore it from a copy") from None


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented ASCII JSON, by way of a scratch file beside it.

    After a crash at any moment `path` holds the whole old value or the whole new one. Several
    processes may write at once, for each has a scratch file of its own.

    Raises:
        InputError: JSON cannot hold the value.
        RunError: the system refused the write.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        to_json_value(value, path.name)  # says which field it is
        raise InputError(f"{path.name} cannot be written as JSON: {error}") from None
    try:
        with replace_file(path) as file:
            file.write(f"{text}\n".encode())
        sync_directory(path.parent)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {format_os_error(error)}; what it held is kept"
        ) from error


def sync_directory(path: Path) -> None:
    """Make new names in the directory `path` survive a power failure."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def check_no_link(run: Path, path: Path) -> None:
    """Refuse a path in a run that a link leads out of: runs come from other people too.

    Raises:
        RunError: a link stands between the run and the path, or at the path.
    """
    for each in (path, *path.parents):
        if each == run:
            return
        if each.is_symlink():
            raise RunError(
                f"cannot write {path}: {each} is a link out of the run; remove it, or name "
                "another place"
            )


def format_os_error(error: OSError | ValueError) -> str:
    """Return what the system says about `error`, in words."""
    told = error.strerror if isinstance(error, OSError) else ""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        told = "it is a link, which may lead out of the run; put a file in its place"
    return (told or str(error) or type(error).__name__).lower()


def resume_argument(path: Path) -> str:
    """Return how a user continues the run in `path`."""
    return f"resume={str(path)!r}"


class Lock:
    """An exclusive lock on a run directory. It ends with the process that holds it."""

    __slots__ = ("__weakref__", "_fd", "path")

    def __init__(self, path: Path) -> None:
        """Take the lock file `path`.

        Raises:
            RunInUseError: it is taken, by whom the message names.
            RunError: it cannot be made.
        """
        self.path = path
        self._fd = -1
        while self._fd < 0:
            fd = self._take(path)
            if is_at(fd, path):
                self._fd = fd
            else:  # the former holder has just removed the file
                os.close(fd)
        _held.add(self)

    @staticmethod
    def _take(path: Path) -> int:
        """Lock the file `path` and write the process into it; returns its descriptor."""
        is_new = not os.path.lexists(path)
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if os.path.islink(path):
                raise RunError(
                    f"{path} is a link, which may lead out of the run; remove it"
                ) from None
            raise RunError(f"cannot write in {path.parent}: {format_os_error(error)}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            raise RunInUseError(
                f"{path.parent} is in use by {holder}; wait until it ends, or stop it first"
            ) from None
        except OSError as error:
            os.close(fd)
            if is_new:
                with suppress(OSError):
                    path.unlink()
            raise RunError(
                f"cannot lock {path}: {format_os_error(error)}; the file system may have no "
                "locks: choose a "
                "directory on a local disk, or mount it with locks"
            ) from error
        return fd

    @property
    def is_in_place(self) -> bool:
        """Whether this process holds the lock, and its file is still at `path`."""
        try:
            return self._fd >= 0 and is_at(self._fd, self.path)
        except OSError:
            return False

    def release(self) -> None:
        """Give the lock back; the file stays for the next process."""
        if self._fd >= 0:
            with suppress(OSError):  # only messages need the holder's name
                os.ftruncate(self._fd, 0)
            self.close()

    def remove(self) -> None:
        """Give the lock back and remove its file; a process that has opened it tries again."""
        if self._fd >= 0:
            with suppress(OSError):
                self.path.unlink()
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def close(self) -> None:
        """Close the file. The lock ends when no process has the file open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(fd: int) -> str:
    words = os.pread(fd, 300, 0).decode("ascii", "replace").split()
    if len(words) != 2 or not words[0].isdigit():
        return "another process"
    return f"process {words[0]} on {words[1]!r}"


_held: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it after its parent's death.
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
