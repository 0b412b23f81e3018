"""What a new run has made, so that it can be removed if the run ends without a record."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from treegen.common.files.temporary_files import sweep, sweep_scratch
from treegen.errors import RunError
from treegen.runs.files import Lock, format_os_error, sync_directory

# The files that a run without records may have written. Other files are not the run's.
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
    """The directory of a new run.

    path: the directory.
    directories: it and those above it, as far as they did not exist; outermost first.
    before: the names that were in it already.
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
        except (OSError, ValueError) as error:  # the latter for a name with a NUL
            _remove_directories(missing)
            raise RunError(
                f"cannot make the directory {path}: {format_os_error(error)}; choose another path"
            ) from error

    def lock(self) -> Lock:
        """Take the run's lock; if it is taken, remove what was made and raise RunError."""
        try:
            return Lock(self.path / "run.lock")
        except RunError:
            _remove_directories(self.directories)
            raise

    def undo(self, lock: Lock) -> None:
        """Remove the run and the directories that are empty then; what was there before stays.

        In a forked child, or if the directory was moved, nothing is removed: the run is not ours.
        """
        if not lock.is_in_place:
            lock.close()
            return
        with suppress(OSError):
            remove_scratch_files(self.path)
            for file in [each for each in self.path.iterdir() if each.name not in self.before]:
                # An empty file was made to hold verdicts, whose file has a name of its task's own.
                if file.name in _WRITTEN or (file != lock.path and _is_empty(file)):
                    file.unlink()
                elif file.name in _FOLDERS and file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
        lock.remove()
        _remove_directories(self.directories)


def check_directory(path: Path) -> None:
    """Refuse early a directory in which no run could be begun; nothing is made.

    Raises:
        RunError: a file is in its place or above it, or a directory there cannot be written.
    """
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not os.path.isdir(there):
        told = "is a file" if os.path.exists(there) else "is a link that leads nowhere"
        raise RunError(f"cannot make the directory {path}: {there} {told}; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(
            f"cannot write in {there}: no permission, or a read-only file system; choose another "
            "path"
        )


def remove_scratch_files(path: Path) -> None:
    """Remove the scratch files of processes that were killed while they wrote."""
    for name in _REWRITTEN:
        sweep_scratch(path / name)
    sweep(path, "run.json.tmp")  # of an early version


def _is_empty(file: Path) -> bool:
    return file.is_file() and not file.stat().st_size


def _remove_directories(directories: Sequence[Path]) -> None:
    for each in reversed(directories):
        with suppress(OSError):  # it is not empty
            each.rmdir()
