"""An append-only file of JSON records that survives being killed at any byte.

One record is one line; see `treegen.runs.record_format`. The newline is written last, in the same
write() as the record, so a crash can only damage the end of the file:

- a last line with a correct crc is a whole record, with or without its newline (resuming adds it);
- a last line with a wrong crc is torn: resuming copies it to a separate file and cuts it off;
- a wrong line before other lines is damage that a crash here cannot cause, so it is an error.
"""

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from treegen.common.files import (
    BUFFER_BYTES,
    MAX_LINE_BYTES,
    FileTooLargeError,
    NotRegularError,
    check_line,
    describe_read_error,
    is_at,
    iterate_lines,
    open_regular,
)
from treegen.common.formatting import format_bytes
from treegen.common.lifetimes import pause_gc
from treegen.errors import RunError, arg
from treegen.runs.files import Lock, describe_write_error, format_os_error, sync_directory
from treegen.runs.record_format import (
    Key,
    decode_records,
    decode_unchecked,
    encode_record,
    key_of,
    read_key,
)

_CHUNK_BYTES: Final = 1 << 20  # bytes read at once for a digest
_LINES_BYTES: Final = 1 << 16  # bytes of lines decoded at once
_NO_MORE: Final = (("", -1), sys.maxsize)
_SYNC_SECONDS: Final = 1.0
# If fsync is slow it is called less often, so that it takes at most a twentieth of the time, but at
# least once in this many seconds.
_MAX_SYNC_SECONDS: Final = 10.0


class Digest(Protocol):
    """An object that accepts bytes as they are read, such as a hash of hashlib."""

    def update(self, data: bytes, /) -> object:
        """Add bytes."""


class CorruptLineError(RunError):
    """A line of a file of records is not as it was written.

    Attributes:
        problem: The file, the line, and what is wrong with it.
    """

    def __init__(self, file: Path, number: int, why: str, next_step: str) -> None:
        """Create the error.

        Args:
            file: The file.
            number: The number of the line, from 1.
            why: What is wrong with the line.
            next_step: The action with which the user continues, such as "run the same command
                again".
        """
        super().__init__(
            f"{file}:{number}: corrupt line ({why}); restore the file from a copy, or "
            f"delete this line and {next_step} to draw this sample again"
        )
        self.problem = f"{file.name}, line {number:,}: {why}"


class RecordFile:
    """The records of one file, at most one per key; written by one thread of one process."""

    def __init__(self, path: Path, *, writable: bool, next_step: str | None = None) -> None:
        """Read an existing file; with `writable`, also repair its end.

        Args:
            path: The file.
            writable: Whether records will be appended.
            next_step: The action with which the user continues after an error, for messages.
                Default: resume the run.

        Raises:
            RunError: the file cannot be read, is corrupt before its end, or has two different
                records for one key.
        """
        self.path: Final = path
        self._next_step = next_step or f"continue with {arg('resume', str(path.parent))}"
        # What was wrong at the end of the file and how it was repaired, one sentence each.
        self.notices: list[str] = []
        self._offsets: dict[Key, int] = {}
        self._end = 0
        self._read = 0  # bytes read, including a torn line at the end
        self._fd = -1
        self._is_end_unknown = False
        self._dirty = False
        self._sync_due = 0.0
        try:
            with pause_gc():
                ends_with_newline, tail = self._scan()
            self._read = self._end + (tail[1] if tail else 0)
            if writable:
                self._fd = open_regular(path, os.O_RDWR | os.O_APPEND)
                self._repair_tail(ends_with_newline, tail)
            elif tail is not None:
                self.notices.append(
                    f"the last line of {path.name} (line {tail[0]}) is unfinished and is skipped"
                )
        except OSError as error:
            self.close()
            if isinstance(error, NotRegularError):
                raise RunError(
                    f"cannot read {path}: the path is a pipe or a device; replace the path with a "
                    "copy of the file"
                ) from error
            if isinstance(error, FileTooLargeError):
                raise RunError(describe_read_error(path, error)) from error
            raise RunError(
                f"cannot read or repair {path}: {format_os_error(error)}; check the permissions "
                "of the file and of its folder"
            ) from error

    @property
    def keys(self) -> KeysView[Key]:
        """The keys of the records, as a live set in the order of the file."""
        return self._offsets.keys()

    def next_indices(self) -> Counter[str]:
        """Return the sample index that follows the largest one of each problem; 0 without one."""
        following: Counter[str] = Counter()
        for problem_id, index in self._offsets:
            following[problem_id] = max(following[problem_id], index + 1)
        return following

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still at its path; true once it is closed."""
        with suppress(OSError):
            return self._fd < 0 or is_at(self._fd, self.path)
        return False

    @property
    def has_grown(self) -> bool:
        """Whether a file that was opened for reading has become longer."""
        with suppress(OSError):
            return os.path.getsize(self.path) > self._read
        return False

    def append(self, record: Mapping[str, Any], digest: Digest | None = None) -> None:
        """Append `record` in one write; flush to the disk about once a second.

        Args:
            record: The record.
            digest: A SHA-256 object that is updated with the line once it is written. Default:
                none.

        Raises:
            InputError: the record has no key, or a value that JSON cannot represent.
            RunError: its key exists already, its line is too long to be read again, or the system
                refused the write; then the file is cut back to the whole records, so that a later
                append starts cleanly.
        """
        key = key_of(record)
        if key in self._offsets:
            raise RunError(f"{self.path}: sample {key[1]} of problem {key[0]!r} already exists")
        line = encode_record(record)
        if len(line) > MAX_LINE_BYTES:
            raise RunError(
                f"cannot write {self.path}: sample {key[1]} of problem {key[0]!r:.60} has more "
                f"than {format_bytes(MAX_LINE_BYTES)}; limit its number of tokens"
            )
        self._check_writable()
        start = self._end
        try:
            self._write(line)
            self._offsets[key] = start
            self._end = start + len(line)
        except BaseException as error:
            self._offsets.pop(key, None)
            outcome = self._cut(start)
            if isinstance(error, OSError):
                raise RunError(
                    f"cannot write {self.path}: {format_os_error(error)}; {outcome}"
                ) from error
            raise
        if digest is not None:
            digest.update(line)
        self._dirty = True
        if time.monotonic() >= self._sync_due:
            self.sync()

    def sync(self) -> None:
        """Make all records survive a power failure.

        Raises:
            RunError: the system reported an error; the latest records may be lost.
        """
        if not self._dirty or self._fd < 0:
            return
        begin = time.monotonic()
        try:
            os.fsync(self._fd)
        except OSError as error:
            # The system may have dropped data that it could not write, and reports it only once.
            self._is_end_unknown = True
            raise RunError(
                f"cannot flush {self.path} to the disk: {format_os_error(error)}; the latest "
                f"records may be lost; {self._next_step} to check the file"
            ) from error
        end = time.monotonic()
        self._dirty = False
        self._sync_due = end + min(_MAX_SYNC_SECONDS, max(_SYNC_SECONDS, 20 * (end - begin)))

    def digest(self) -> str:
        """Return the SHA-256 of the lines of all current records.

        Raises:
            RunError: the file cannot be read.
        """
        hashed, remaining = hashlib.sha256(), self._end
        try:
            with open(open_regular(self.path), "rb") as file:
                while remaining and (part := file.read(min(remaining, _CHUNK_BYTES))):
                    hashed.update(part)
                    remaining -= len(part)
        except OSError as error:
            raise RunError(describe_read_error(self.path, error)) from error
        return hashed.hexdigest()

    def records(self, digest: Digest | None = None) -> Iterator[dict[str, Any]]:
        """Yield all current records, each key once, in the order of the file.

        Args:
            digest: A SHA-256 object that is updated with the lines; at the end it equals
                `RecordFile.digest`. Default: none.

        Raises:
            RunError: the file cannot be read, or is corrupt.
        """
        end, offset, number = self._end, 0, 0
        # First offset of each key, in the order of the file; further lines of a key are duplicates.
        firsts = iter([*self._offsets.items()])
        key, first = next(firsts, _NO_MORE)
        try:
            with open(open_regular(self.path), "rb", BUFFER_BYTES) as file:
                for lines in _read_lines(file, end):
                    if digest is not None:
                        digest.update(b"".join(lines))
                    decoded = decode_records(lines)
                    for line in lines:
                        number += 1
                        try:
                            record = next(decoded)
                        except ValueError as error:
                            raise self._make_corrupt_error(number, str(error)) from None
                        while first < offset:
                            key, first = next(firsts, _NO_MORE)
                        record_key = record["problem_id"], record["sample_index"]
                        if first == offset and key == record_key:
                            yield record
                        offset += len(line)
        except OSError as error:
            raise RunError(describe_read_error(self.path, error)) from error
        if offset < end:
            raise RunError(
                f"the file {self.path} was shortened after it was opened; open the file again"
            )

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if self._fd >= 0:
            try:
                if not self._is_end_unknown:
                    self.sync()
            finally:
                os.close(self._fd)
                self._fd = -1

    def _scan(self) -> tuple[bool, tuple[int, int, str] | None]:
        """Index the whole records; return whether the last has its newline, and the torn line.

        A torn line is described by its number, its length in bytes and what is wrong with it.
        """
        torn: tuple[int, int, str] | None = None
        line = b"\n"
        with open(open_regular(self.path), "rb", BUFFER_BYTES) as file:
            for number, line in enumerate(iterate_lines(file), 1):
                if torn is not None:
                    raise self._make_corrupt_error(torn[0], torn[2])
                try:
                    key = read_key(line)
                except ValueError as error:
                    check_line(line, self.path)
                    torn = (number, len(line), str(error))
                    continue
                first = self._offsets.setdefault(key, self._end)
                if first != self._end:
                    self._check_same(key, line, first, number)
                self._end += len(line)
        return torn is not None or line.endswith(b"\n"), torn

    def _check_same(self, key: Key, line: bytes, first: int, number: int) -> None:
        with open(open_regular(self.path), "rb") as file:
            file.seek(first)
            earlier = file.readline(MAX_LINE_BYTES)
        texts = []
        for offset, line_read in ((first, earlier), (self._end, line)):
            try:
                # Compare text, because 1, 1.0 and True are equal in Python.
                texts.append(json.dumps(decode_unchecked(line_read), sort_keys=True))
            except ValueError as error:
                raise self._make_corrupt_error(self._line_number(offset), str(error)) from None
        if texts[0] != texts[1]:
            raise RunError(
                f"{self.path} has two different records for sample {key[1]} of problem {key[0]!r}, "
                f"in lines {self._line_number(first)} and {number}; delete the wrong line"
            )

    def _line_number(self, offset: int) -> int:
        """Return the number of the line that starts at byte `offset`, from 1."""
        with open(open_regular(self.path), "rb") as file:
            return file.read(offset).count(b"\n") + 1

    def _make_corrupt_error(self, number: int, why: str) -> RunError:
        return CorruptLineError(self.path, number, why, self._next_step)

    def _repair_tail(self, ends_with_newline: bool, torn: tuple[int, int, str] | None) -> None:
        if not ends_with_newline:
            try:
                self._write(b"\n")
            except OSError:
                os.ftruncate(self._fd, self._end)
                raise
            self._end += 1
            self.notices.append(f"a missing newline was added to the last line of {self.path.name}")
        if torn is None:
            return
        number, size, why = torn
        tail = os.pread(self._fd, size, self._end)
        copy = self._copy_torn(tail)
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        self.notices.append(
            f"the last line of {self.path.name} (line {number}) was unfinished ({len(tail):,} "
            f"bytes; {why}); the line was moved to {copy.name}, and its sample is drawn again"
        )

    def _copy_torn(self, tail: bytes) -> Path:
        """Write `tail` to a new file in the same directory and return its path."""
        number = 1
        while True:
            copy = self.path.with_name(f"{self.path.stem}.torn-{number}")
            try:
                file = open(copy, "xb")  # noqa: SIM115 (closed by the with below)
                break
            except FileExistsError:
                number += 1
        try:
            with file:
                file.write(tail)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        sync_directory(copy.parent)
        return copy

    def _write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        while written < len(data):  # a disk that fills up accepts some of the bytes, and then none
            written += os.write(self._fd, data[written:])

    def _cut(self, end: int) -> str:
        """Cut the file back to `end`; return a sentence on its content and how to continue."""
        self._is_end_unknown = True
        self._end = end
        try:
            os.ftruncate(self._fd, end)
        except OSError as error:
            part = (
                f"a part of the next sample stays in the file ({format_os_error(error)}) until "
                "the run is resumed"
            )
        else:
            self._is_end_unknown = False
            part = "the next sample is not in the file"
        return (
            f"{len(self._offsets):,} finished samples are kept, and {part}; free some disk "
            f"space or fix the cause, then {self._next_step}"
        )

    def _check_writable(self) -> None:
        if self._fd < 0:
            raise RunError(f"{self.path} is closed, or was opened for reading only")
        if self._is_end_unknown:
            raise RunError(
                f"an earlier write to {self.path} failed, so the end of the file is unknown; "
                f"{self._next_step}"
            )


def _read_lines(file: BinaryIO, end: int) -> Iterator[list[bytes]]:
    """Yield the lines that begin before byte `end`, as lists of about `_LINES_BYTES` bytes."""
    while end > 0 and (lines := file.readlines(min(_LINES_BYTES, end))):
        size = sum(map(len, lines))
        while size - len(lines[-1]) >= end:  # readlines returned lines after `end`
            size -= len(lines.pop())
        yield lines
        end -= size


@contextmanager
def open_for_append(path: Path, lock: str, *, overwrite: bool = False) -> Iterator[RecordFile]:
    """Open a file of records to read and to append; it is locked meanwhile.

    Args:
        path: The file, which is created if it does not exist.
        lock: Name of the lock file in the same directory.
        overwrite: Whether to remove an existing file first, under the same lock.

    Yields:
        The records.

    Raises:
        RunError: another process holds the lock, or the file is corrupt or cannot be written.
    """
    with Lock(path.with_name(lock)):
        try:
            if overwrite:
                path.unlink(missing_ok=True)
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT))
            sync_directory(path.parent)
        except OSError as error:
            old = "" if overwrite else "; the old file is unchanged"
            raise RunError(f"{describe_write_error(path, error)}{old}") from error
        with closing(
            RecordFile(path, writable=True, next_step="run the same command again")
        ) as file:
            yield file
