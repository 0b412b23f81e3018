"""Folders that tests of one process share."""

from pathlib import Path
from tempfile import mkdtemp

_parents: list[Path] = []


def keep_folders_in(parent: Path) -> None:
    """Make new folders in a folder that pytest removes."""
    _parents[:] = [parent]


def make_kept_folder() -> Path:
    """Return a new folder that exists until the tests end."""
    return Path(mkdtemp(dir=_parents[0]))
