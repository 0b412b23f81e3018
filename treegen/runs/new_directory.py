"""The files that a new run creates, so that they can be removed if it ends without a record."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from treegen.common.files import sweep, sweep_scratch
from treegen.errors import RunError
from treegen.runs.files import Lock, format_os_error, sync_directory

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
    before: frozenset[str]
    """The names that were already in it."""

    @classmethod
    def directory(cls, path: Path) -> Self:
        """Create the directory.

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
            for file in [entry for entry in self.path.iterdir() if entry.name not in self.before]:
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
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        reason = "is a file" if os.path.exists(there) else "is a link that leads nowhere"
        raise RunError(f"cannot make the directory {path}: {there} {reason}; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(
            f"cannot write in {there}: no permission, or a read-only file system; choose another "
            "path"
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
