"""Files of run directories: atomic writes, strict JSON, the lock, and what a new run creates.

The files that a new run creates are removed if it ends without a record.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from treegen.common.files import (
    MAX_BYTES,
    describe_read_error,
    is_at,
    open_regular,
    read_bytes,
    read_lines,
    replace_file,
    sweep,
    sweep_scratch,
)
from treegen.common.formatting import format_bytes
from treegen.errors import InputError, RunError, RunInUseError

# Errors of file systems that cannot fsync a directory. EACCES comes from a parent directory that
# may be searched but not read.
_NO_DIRECTORY_SYNC: Final = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES}
_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def to_json_value(value: object, name: str = "") -> Any:
    """Return `value` as JSON would return it: dicts with str keys, lists, finite numbers, str.

    Paths become strings, and a float that is an integer becomes an int, so that 1 and 1.0 are
    the same setting.

    Raises:
        InputError: JSON cannot represent a value; the message has its dotted path.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name or 'the value'} is {value}; JSON has only finite numbers")
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
    raise InputError(
        f"{name or 'the value'} is a {type(value).__name__}, which JSON cannot represent"
    )


def check_id(problem_id: str) -> None:
    """Raise an error for an id that changes when it is written to and read from JSON.

    Raises:
        InputError: it is such an id.
    """
    # Two surrogates in a row are read as the one character that they encode.
    if not problem_id.isascii() and json.loads(json.dumps(problem_id)) != problem_id:
        raise InputError(
            f"the problem id {problem_id!r} contains a surrogate pair; use the character "
            "that the pair encodes"
        )


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


# parse_constant is only called for NaN, Infinity and -Infinity.
_decoder: Final = json.JSONDecoder(parse_constant=_no_constant)


def parse_json(text: str) -> Any:
    """Return the value of strict JSON `text`.

    Raises:
        ValueError: it is not strict JSON.
    """
    try:
        if text.startswith("{"):  # as in records; faster without skipping spaces
            value, end = _decoder.raw_decode(text)
            if end == len(text):
                return value
        return _decoder.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def read_sample_lines(path: Path) -> list[tuple[int, str]]:
    r"""Return (number from 1, text) for every line of a UTF-8 file that is not blank.

    Only a newline ends a line. `splitlines` would also split at U+2028 and similar characters.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    lines = (line.decode().removeprefix("\ufeff") for line in read_lines(path))
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def parse_sample_line(line: str) -> tuple[tuple[str, int], dict[str, Any]]:
    """Return the (problem, index) of the sample that a line describes, and the line's fields.

    Raises:
        KeyError, TypeError, ValueError: the line is not an object that names a sample.
    """
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    index = row["sample_index"]
    is_fraction = isinstance(index, float) and not index.is_integer()
    if index is None or isinstance(index, bool) or is_fraction:
        raise ValueError(f"sample_index must be a whole number, got {index!r}")
    return (str(row["problem_id"]), int(index)), row


def read_json(path: Path) -> Any:
    """Return the value in the JSON file `path`.

    Raises:
        RunError: the file cannot be read, or is corrupt.
    """
    try:
        return parse_json(read_bytes(path).decode())
    except OSError as error:
        raise RunError(describe_read_error(path, error)) from error
    except ValueError as error:
        raise RunError(f"{path} is corrupt ({error}); restore it from a copy") from None


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented ASCII JSON, through a scratch file in its directory.

    After a crash at any moment `path` has the whole old value or the whole new one. Several
    processes may write at once, because each has its own scratch file.

    Raises:
        InputError: JSON cannot represent the value.
        RunError: the system refused the write, or the file would be too large for `read_json`.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        to_json_value(value, path.name)  # raises an error that names the field
        raise InputError(f"{path.name} cannot be written as JSON: {error}") from None
    old = "; the old file is unchanged" if path.exists() else ""
    if len(text) >= MAX_BYTES:  # a newline follows
        raise RunError(
            f"cannot write {path}: it would have more than {format_bytes(MAX_BYTES)}; run "
            f"fewer problems, or problems with shorter ids{old}"
        )
    try:
        with replace_file(path) as file:
            file.write(f"{text}\n".encode())
        sync_directory(path.parent)
    except OSError as error:
        raise RunError(f"{describe_write_error(path, error)}{old}") from error


def sync_directory(path: Path) -> None:
    """Make new file names in the directory `path` survive a power failure."""
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
    """Raise an error if a link leads from a path out of the run, which may come from other people.

    Raises:
        RunError: the path, or a directory between the run and the path, is a link.
    """
    for ancestor in (path, *path.parents):
        if ancestor == run:
            return
        if ancestor.is_symlink():
            raise RunError(
                f"cannot write {path}: {ancestor} is a symbolic link that leads out of the run; "
                "remove the link, or choose another path"
            )


def format_os_error(error: OSError | ValueError) -> str:
    """Return the system's message for `error`."""
    reason = error.strerror if isinstance(error, OSError) else ""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        reason = (
            "the path is a symbolic link, which may lead out of the run; replace the link "
            "with a file"
        )
    return (reason or str(error) or type(error).__name__).lower()


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file cannot be written, why, and what to do."""
    is_full = error.errno in _DISK_FULL
    remedy = "free some disk space" if is_full else "check the path and its permissions"
    return f"cannot write {path}: {format_os_error(error)}; {remedy}"


class Lock:
    """An exclusive lock on a run directory. It ends with the process that holds it."""

    __slots__ = ("__weakref__", "_fd", "path")

    def __init__(self, path: Path) -> None:
        """Take the lock file `path`.

        Raises:
            RunInUseError: another process holds the lock; the message names it.
            RunError: the file cannot be created.
        """
        self.path = path
        self._fd = -1
        while self._fd < 0:
            fd = self._take(path)
            if is_at(fd, path):
                self._fd = fd
            else:  # the previous holder has just removed the file
                os.close(fd)
        _open_locks.add(self)

    @staticmethod
    def _take(path: Path) -> int:
        """Lock the file `path` and write the process into it; return its descriptor."""
        is_new = not os.path.lexists(path)
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if os.path.islink(path):
                raise RunError(
                    f"{path} is a symbolic link, which may lead out of the run; remove the link"
                ) from None
            raise RunError(describe_write_error(f"in {path.parent}", error)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_lock_holder(fd)
            os.close(fd)
            raise RunInUseError(
                f"{path.parent} is in use by {holder}; wait until the process ends, or stop the "
                "process"
            ) from None
        except OSError as error:
            os.close(fd)
            if is_new:
                with suppress(OSError):
                    path.unlink()
            raise RunError(
                f"cannot lock {path}: {format_os_error(error)}, perhaps because the file system "
                "does not support locks; choose a directory on a local disk, or mount the file "
                "system with locks"
            ) from error
        with suppress(OSError):  # a full disk; only messages need the holder's name
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        return fd

    @property
    def is_in_place(self) -> bool:
        """Whether this process holds the lock, and its file is still at `path`."""
        try:
            return self._fd >= 0 and is_at(self._fd, self.path)
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; the file stays for the next process."""
        if self._fd >= 0:
            with suppress(OSError):  # only messages need the holder's name
                os.ftruncate(self._fd, 0)
            self.close()

    def remove(self) -> None:
        """Release the lock and remove its file; a process that has opened it tries again."""
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


def _read_lock_holder(fd: int) -> str:
    words = os.pread(fd, 300, 0).decode("ascii", "replace").split()
    if len(words) != 2 or not words[0].isdigit():
        return "another process"
    return f"process {words[0]} on {words[1]!r}"


_open_locks: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it after its parent's death.
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


# The files that a run without records may have written. Other files do not belong to the run.
_WRITTEN: Final = (
    "run.json",
    "samples.jsonl",
    "trees.jsonl",
    "results.json",
    "progress.jsonl",
    "images.json",
)
_FOLDERS: Final = ("images",)
_REWRITTEN: Final = ("run.json", "results.json", "images.json")


@dataclass(frozen=True, slots=True)
class NewDirectory:
    """The directory of a new run."""

    path: Path
    """The directory."""
    directories: tuple[Path, ...]
    """The directory and its parents, as far as they did not exist; outermost first."""
    earlier_names: frozenset[str]
    """The names of the files that the directory already contained."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the directory `path` and its missing parents.

        Raises:
            RunError: it cannot be created.
        """
        missing = [parent for parent in (path, *path.parents) if not os.path.exists(parent)][::-1]
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent)
            return cls(path, tuple(missing), frozenset(os.listdir(path)))
        except (OSError, ValueError) as error:  # the latter for a name with a NUL
            _remove_directories(missing)
            raise RunError(
                f"cannot make the directory {path}: {format_os_error(error)}; choose another path"
            ) from error

    def lock(self) -> Lock:
        """Take the run's lock; if it is taken, remove the new directories and raise RunError."""
        try:
            return Lock(self.path / "run.lock")
        except RunError:
            _remove_directories(self.directories)
            raise

    def undo(self, lock: Lock) -> None:
        """Remove the run and its new directories that are then empty; earlier files stay.

        In a forked child, or if the directory was moved, nothing is removed: the run belongs to
        another process then, or is elsewhere.
        """
        if not lock.is_in_place:
            lock.close()
            return
        with suppress(OSError):
            remove_scratch_files(self.path)
            for file in [
                entry for entry in self.path.iterdir() if entry.name not in self.earlier_names
            ]:
                # An empty file was made for verdicts; the task determines its name.
                if file.name in _WRITTEN or (
                    file != lock.path and file.is_file() and not file.stat().st_size
                ):
                    file.unlink()
                elif file.name in _FOLDERS and file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
        lock.remove()
        _remove_directories(self.directories)


def check_directory(path: Path) -> None:
    """Raise early if no run could be started in a directory; nothing is created.

    Raises:
        RunError: the path or a parent is a file, or the directory cannot be written.
    """
    existing = next(
        parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent)
    )
    if not os.path.isdir(existing):
        reason = (
            "is a file"
            if os.path.exists(existing)
            else "is a symbolic link to a path that does not exist"
        )
        raise RunError(
            f"cannot make the directory {path}: {existing} {reason}; choose another path"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunError(
            f"cannot write in {existing}: no permission, or a read-only file system; choose "
            "another path"
        )


def remove_scratch_files(path: Path) -> None:
    """Remove the scratch files of processes that were killed while writing."""
    for name in _REWRITTEN:
        sweep_scratch(path / name)
    sweep(path, "run.json.tmp")  # written by an early version


def _remove_directories(directories: Sequence[Path]) -> None:
    for directory in reversed(directories):
        with suppress(OSError):  # the directory is not empty
            directory.rmdir()
