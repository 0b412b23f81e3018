"""What a new run has made, so that it can be removed if it never comes to a first record."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from treegen.errors import RunError
from treegen.runs.files import Lock, reason, sync_directory
from treegen.runs.leftovers import sweep

# What a run without records may have written; other files in its directory are not its.
_WRITTEN: Final = ("run.json", "samples.jsonl", "trees.jsonl", "results.json", "progress.jsonl")
_SCRATCH: Final = ("run.*.tmp", "results.*.tmp")


@dataclass(frozen=True, slots=True)
class Made:
    """The directory of a new run.

    directories: it and those above it that were not there, outermost first. before: what was in
    it already.
    """

    path: Path
    directories: tuple[Path, ...]
    before: frozenset[str]

    @classmethod
    def directory(cls, path: Path) -> Self:
        """Make the directory.

        Raises:
            RunError: it cannot be made.
        """
        missing = [each for each in (path, *path.parents) if not os.path.exists(each)][::-1]
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent)
            return cls(path, tuple(missing), frozenset(os.listdir(path)))
        except OSError as error:
            _remove_directories(missing)
            raise RunError(f"cannot make the directory {path}: {reason(error)}") from error

    def lock(self) -> Lock:
        """Take the run's lock; if that cannot be, undo all.

        Raises:
            RunError: it is taken, or cannot be made.
        """
        try:
            return Lock(self.path / "run.lock")
        except RunError:
            _remove_directories(self.directories)
            raise

    def undo(self, lock: Lock) -> None:
        """Remove the run, and the directories that are empty then; what was there before stays.

        Nothing happens in a forked child, or where the directory was moved: the run is not ours.
        """
        if not lock.is_in_place:
            lock.close()
            return
        with suppress(OSError):
            tidy(self.path)
            for file in [each for each in self.path.iterdir() if each.name not in self.before]:
                # Empty is what was to hold verdicts, which are not the run's own.
                if file.name in _WRITTEN or (file != lock.path and _is_empty(file)):
                    file.unlink()
        lock.remove()
        _remove_directories(self.directories)


def tidy(path: Path) -> None:
    """Remove what processes that were killed have left of files they were writing."""
    for pattern in _SCRATCH:
        sweep(path, pattern)


def _is_empty(file: Path) -> bool:
    return file.is_file() and not file.stat().st_size


def _remove_directories(directories: Sequence[Path]) -> None:
    for each in reversed(directories):
        with suppress(OSError):  # there is something else in it
            each.rmdir()
