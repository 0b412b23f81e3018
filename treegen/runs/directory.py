"""The directory of one run.

    run.json        the settings; also each resume with other free settings or versions
    samples.jsonl   the finished samples, one per line, appended as they finish
    samples.torn-N  the torn end of samples.jsonl after a crash
    results.json    derived from the samples, replaced as a whole
    images.json     the images of the problems, whose files are in images/
    run.lock        held by the one process that appends

samples.jsonl is created before run.json, so a directory with a run.json is a complete run. A run of
searches has trees.jsonl instead of samples.jsonl.
"""

import os
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from treegen.common.files import open_regular
from treegen.errors import RunError, RunInUseError, arg
from treegen.runs.files import (
    Lock,
    NewDirectory,
    format_os_error,
    read_json,
    remove_scratch_files,
    to_json_value,
    write_json,
)
from treegen.runs.record_file import Digest, RecordFile
from treegen.runs.record_format import Key
from treegen.runs.settings import (
    RunInfo,
    RunSettings,
    changed_versions,
    differences,
    from_json,
    to_json,
)

# The file of records of each kind of run, and the command that creates such runs.
_MADE_BY: Final = {"samples.jsonl": "treegen eval", "trees.jsonl": "treegen search"}


class RunDir:
    """An open run directory; get one from `create`, `resume` or `open`, and close it.

    One thread may append. A process forked from the one that opened it must not append.
    """

    records_file: ClassVar[str] = "samples.jsonl"
    num_not_drawn = 0
    """The number of planned samples that need not be drawn; early stopping sets it."""

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        samples: RecordFile,
        lock: Lock | None,
        *,
        notices: Sequence[str] = (),
        new_directory: NewDirectory | None = None,
    ) -> None:
        """Set up the run that `create`, `resume` or `open` has read or created.

        Args:
            path: The directory.
            info: Content of run.json.
            samples: The finished samples.
            lock: Lock on the run; None if it was opened for reading.
            notices: Sentences to show to the user.
            new_directory: The files that `create` has created; None for an existing run.
        """
        self.path = path
        self.info = info
        self._samples = samples
        self._problems = frozenset(info.problem_ids)
        self._lock = lock
        self._notices, self._new_directory = tuple(notices), new_directory

    @classmethod
    def create(cls, path: str | os.PathLike[str], settings: RunSettings) -> Self:
        """Create the directory `path`, and in it a new run to append to.

        Args:
            path: The directory.
            settings: The settings of the run.

        Raises:
            RunError: the directory already has a run, is in use, or cannot be written.
        """
        path = Path(path)
        new_directory = NewDirectory.create(path)
        lock = new_directory.lock()
        try:
            _check_new(path)
        except BaseException:
            lock.release()
            raise
        try:
            remove_scratch_files(path)
            samples = path / cls.records_file
            try:
                os.close(open_regular(samples, os.O_WRONLY | os.O_CREAT))
            except OSError as error:
                raise RunError(
                    f"cannot write {samples}: {format_os_error(error)}; choose another path"
                ) from error
            info = RunInfo(
                fingerprint=settings.fingerprint,
                created=_now(),
                identity=to_json_value(settings.identity),
                free=to_json_value(settings.free),
                problem_ids=tuple(settings.problem_ids),
                planned=settings.planned,
                versions=settings.versions,
                resumes=(),
            )
            _write_info(path, info)
            return cls(
                path,
                info,
                _read_samples(samples, info, writable=True),
                lock,
                new_directory=new_directory,
            )
        except BaseException:
            new_directory.undo(lock)
            raise

    @classmethod
    def resume(cls, path: str | os.PathLike[str], settings: RunSettings) -> Self:
        """Open the run in `path` to append missing samples; repair the end of its file of samples.

        Args:
            path: The directory.
            settings: The settings, which must give the same samples as those of the run.

        Raises:
            RunError: there is no run, it is in use or corrupt, or `settings` would not give the
                same samples; the message names every field that differs.
        """
        path = Path(path)
        _check_present(path, cls.records_file)
        lock = Lock(path / "run.lock")
        try:
            info = _read_info(path)
            if info.fingerprint != settings.fingerprint:
                changes = differences(info, settings)
                raise RunError(
                    f"{path} was started with other settings, so new samples would not match "
                    f"the stored samples: {'; '.join(changes)}; resume with the old values or "
                    "start a new run"
                )
            remove_scratch_files(path)
            samples = _read_samples(path / cls.records_file, info, writable=True)
            try:
                initial = {"free": info.free, "versions": info.versions}
                previous = info.resumes[-1] if info.resumes else initial
                versions = dict(settings.versions)
                if "threads" not in previous.get("versions", {}):  # a run of an earlier treegen
                    versions.pop("threads", None)
                current = {"free": to_json_value(settings.free), "versions": versions}
                if not _is_same(previous, current):
                    info = replace(info, resumes=(*info.resumes, {"time": _now(), **current}))
                    _write_info(path, info)
                missing = len(samples.keys) < info.planned
                changed = changed_versions(previous.get("versions"), versions) if missing else ()
                return cls(path, info, samples, lock, notices=changed)
            except BaseException:
                samples.close()
                raise
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the run in `path` for reading; another process may be appending to it.

        Raises:
            RunError: there is no run, or it is corrupt.
        """
        path = Path(path)
        _check_present(path, cls.records_file)
        info = _read_info(path)
        samples = _read_samples(path / cls.records_file, info, writable=False)
        return cls(path, info, samples, None)

    @property
    def done(self) -> KeysView[Key]:
        """The (problem_id, sample_index) of the finished samples, as a live set."""
        return self._samples.keys

    @property
    def missing(self) -> int:
        """The number of samples that are still to be drawn; negative if too many are stored."""
        return self.info.planned - len(self._samples.keys) - self.num_not_drawn

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about an opened run to show to the user, one sentence each.

        They report repairs at the end of the file of samples, and versions that have changed since
        samples were drawn.
        """
        return (*self._samples.notices, *self._notices)

    def append(self, record: Mapping[str, Any], digest: Digest | None = None) -> None:
        """Store one finished sample, which `record` identifies by problem_id and sample_index.

        Args:
            record: The sample.
            digest: As for `records`; it is updated with the line of the sample. Default: none.

        Raises:
            InputError: the record has no key, or a value that JSON cannot represent.
            RunError: the sample exists already, its problem is not part of this run, or the system
                refused the write; then all earlier samples are kept.
        """
        if record.get("problem_id") not in self._problems:
            raise RunError(f"{record.get('problem_id')!r} is not a problem of the run {self.path}")
        self._samples.append(record, digest)

    def records(self, digest: Digest | None = None) -> Iterator[dict[str, Any]]:
        """Yield the finished samples, each once, in the order in which they finished.

        Args:
            digest: A SHA-256 object that is updated with the lines; at the end it equals
                `RunDir.digest`. Default: none.
        """
        return self._samples.records(digest)

    def digest(self) -> str:
        """Return the SHA-256 of the lines of the finished samples."""
        return self._samples.digest()

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Replace results.json by `results`; also allowed in a run opened for reading.

        Raises:
            InputError: JSON cannot represent a value (for NaN and infinity use None).
            RunInUseError: the run was opened for reading, and has new samples since then, or
                another process appends to it. That process writes results of all samples.
            RunError: the system refused the write, and the previous results are kept; or the
                directory was moved or removed.
        """
        path = self.path / "results.json"
        if self._lock is not None:
            if not self._samples.is_in_place:
                raise RunError(
                    f"the run directory {self.path} was moved or removed during the run; pass "
                    f"the new directory to {arg('resume=')} to keep the finished samples"
                )
            write_json(path, results)
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(Lock(self.path / "run.lock"))
            except RunInUseError:
                raise
            except RunError:  # the file system has no locks, or refuses the write as well
                pass
            if self._samples.has_grown:
                raise RunInUseError(
                    f"the run {self.path} has new samples that treegen has not read; read the "
                    "run again"
                )
            write_json(path, results)

    def results(self) -> Any:
        """Return the content of results.json; None if it does not exist."""
        path = self.path / "results.json"
        return read_json(path) if os.path.exists(path) else None

    def stored_results(self) -> dict[str, Any]:
        """Return the object in results.json; empty if it is missing, corrupt or not an object."""
        with suppress(RunError):
            if isinstance(results := self.results(), dict):
                return results
        return {}

    def sync(self) -> None:
        """Make all appended samples survive a power failure; `append` does so every second."""
        self._samples.sync()

    @property
    def is_new(self) -> bool:
        """Whether this object created the run, and it has no sample yet."""
        return self._new_directory is not None and not self._samples.keys

    def discard(self) -> None:
        """Remove the run and close it if it is new; otherwise do nothing."""
        if self.is_new and self._new_directory is not None and self._lock is not None:
            self._samples.close()
            self._new_directory.undo(self._lock)

    def close(self) -> None:
        """Flush the samples and release the lock on the run."""
        try:
            self._samples.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        """Return the open run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the run; an error of closing does not replace an exception of the block."""
        try:
            self.close()
        except RunError:
            if error is None:
                raise


class SearchRunDir(RunDir):
    """A run of searches; its records are whole trees, one per problem."""

    records_file = "trees.jsonl"
    actions_file: ClassVar = "actions.jsonl"
    """The actions of agents, stored as they happen."""

    @property
    def is_new(self) -> bool:
        """Whether this object created the run, and it has no search and no action yet."""
        file = self.path / self.actions_file
        has_actions = os.path.exists(file) and os.path.getsize(file) > 0
        return super().is_new and not has_actions


def _is_same(previous: Mapping[str, Any], current: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the free settings and versions of two resumes are the same.

    A setting that an earlier version of treegen did not store counts as None.
    """
    for group, values in current.items():
        stored = previous.get(group) or {}
        if not stored.keys() <= values.keys():
            return False
        if any(stored.get(name) != value for name, value in values.items()):
            return False
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_new(path: Path) -> None:
    """Raise RunError for a directory in which samples could be lost or mixed."""
    if os.path.exists(path / "run.json"):
        raise RunError(
            f"{path} already contains a run; continue the run with {arg('resume', str(path))}, "
            "or use another path"
        )
    _check_not_lost(path)


def _check_not_lost(path: Path) -> None:
    """Raise RunError for a directory that has records but no run.json."""
    for name in _MADE_BY:
        file = path / name
        if os.path.exists(file) and os.path.getsize(file):
            raise RunError(
                f"{path} has {name} but no run.json, which contains the settings of the run; "
                "restore run.json from a copy, or start a new run in another directory"
            )


def runs_below(path: Path) -> str:
    """Return the first run directories in a folder, for a message; "" if there are none."""
    with suppress(OSError):
        runs = sorted(str(child.parent) for child in path.glob("*/run.json"))
        return ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
    return ""


def _check_present(path: Path, records_file: str) -> None:
    try:
        os.stat(path / "run.json")
    except PermissionError:
        raise RunError(
            f"cannot read {path}: permission denied; allow your user to read the folder "
            "(chmod u+rx)"
        ) from None
    except (OSError, ValueError):
        pass
    if os.path.isfile(path):
        is_in_run = os.path.exists(path.parent / "run.json")
        example = f", such as {path.parent}" if is_in_run else ""
        raise RunError(f"{path} is a file; pass the directory of a run{example}")
    if not os.path.isdir(path):
        raise RunError(f"there is no run directory {path}; check the path")
    if not os.path.exists(path / "run.json"):
        _check_not_lost(path)
        if runs := runs_below(path):
            raise RunError(
                f"{path} is not a run directory, but contains run directories; use one of {runs}"
            )
        raise RunError(
            f"{path} has no run.json: the path is not a run directory, or the run was stopped "
            f"before its first sample; start the run again without {arg('resume=')}"
        )
    if os.path.exists(path / records_file):
        return
    for name, command in _MADE_BY.items():
        if os.path.exists(path / name):
            raise RunError(
                f"{path} was created with `{command}`, not with `{_MADE_BY[records_file]}`; use a "
                f"run of `{_MADE_BY[records_file]}`, or continue this run with `{command} --resume`"
            )
    raise RunError(
        f"{path} has no {records_file}; restore the file from a copy, or create an empty file "
        "with this name to draw all samples again"
    )


def _read_info(path: Path) -> RunInfo:
    name = path / "run.json"
    return from_json(read_json(name), str(name))


def _write_info(path: Path, info: RunInfo) -> None:
    write_json(path / "run.json", to_json(info))


def _read_samples(path: Path, info: RunInfo, *, writable: bool) -> RecordFile:
    samples = RecordFile(path, writable=writable)
    unknown_ids = {problem_id for problem_id, _ in samples.keys} - set(info.problem_ids)
    if unknown_ids:
        samples.close()
        raise RunError(
            f"{samples.path} has samples of {len(unknown_ids):,} problems that are not in this "
            f"run, such as {min(unknown_ids)!r}; replace the file with the file of this run"
        )
    return samples
