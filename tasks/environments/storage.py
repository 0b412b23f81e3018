"""The directories of worlds and snapshots on disk: quota, lock, and removal of leftovers.

A directory of treegen's own has a marker, and its process holds a lock on it. So a later process
can tell directories that a killed process left from those in use, and from other people's.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from treegen.common.files import create_locked, sweep
from treegen.errors import CapacityError, InputError, arg
from treegen.tasks.environments.directories import (
    DirectoryLimitError,
    DirectorySize,
    clone,
    copy_tree,
    measure_and_fix_modes,
    open_folder,
    remove_tree,
)

_NAME: Final = "treegen-worlds-"
_MARKER: Final = ".treegen-worlds"
_PARTIAL: Final = ".partial"
_ID: Final = r"[0-9a-f]{16}"
_UNLIMITED: Final = DirectorySize(1 << 62, 1 << 62)


def remove_leftovers() -> None:
    """Remove the temporary directories of environments whose process has died."""
    sweep(Path(tempfile.gettempdir()), f"{_NAME}*", _remove_marked)


def _remove_marked(folder: Path) -> None:
    if stat.S_ISREG(os.lstat(folder / _MARKER).st_mode):
        remove_tree(folder)


class Storage:
    """A directory with directories of worlds and of snapshots. Any thread may use it.

    Args:
        folder: The directory, new, empty or from an earlier storage, whose snapshots are kept; None
            for a temporary one.
        max_size: Maximum files and bytes of a world.
        max_snapshot_bytes: Maximum bytes of all snapshots together.

    Raises:
        InputError: The directory cannot be used, another process uses it, or it has other files.

    Attributes:
        max_size: Maximum files and bytes of a world.
        has_reflinks: Whether copies of files share their blocks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        max_size: DirectorySize,
        max_snapshot_bytes: int,
    ) -> None:
        self.max_size = max_size
        self._free_bytes, self._lock = max_snapshot_bytes, threading.Lock()
        self._created: set[str] = set()
        with ExitStack() as stack:
            if folder is None:
                remove_leftovers()
                path = Path(tempfile.gettempdir(), f"{_NAME}{secrets.token_hex(8)}")
                stack.callback(remove_tree, path)
                stack.enter_context(create_locked(path, folder=True))
                path.chmod(0o711)  # the users that run programs must get through
            else:
                path = Path(folder).absolute()
                _lock_folder(path, stack)
            self._worlds, self._snapshots = path / "worlds", path / "snapshots"
            try:
                _check_kinds(path)
                worlds = _list_entries(self._worlds, _ID)
                snapshots = _list_entries(self._snapshots, f"{_ID}({_PARTIAL})?")
                if folder is not None:
                    stack.callback(self._leave, path)
                (path / _MARKER).touch()
                for directory, mode in ((self._worlds, 0o711), (self._snapshots, 0o700)):
                    with suppress(FileExistsError):
                        directory.mkdir(mode)
                for leftover in (*worlds, *(partial for partial in snapshots if partial.suffix)):
                    remove_tree(leftover)
                self._sizes = {
                    snapshot.name: _measure(snapshot)
                    for snapshot in snapshots
                    if not snapshot.suffix
                }
                self.has_reflinks = _try_reflinks(path)
            except OSError as error:
                raise InputError(
                    f"cannot store snapshots in {_show(error.filename or path)}: "
                    f"{error.strerror}; check the permissions, or use another {arg('folder')}"
                ) from None
            self._free_bytes -= sum(self._sizes.values())
            self._stack = stack.pop_all()

    def create_world(self, uid: int | None) -> str:
        """Create an empty directory for a world, and return its path.

        Args:
            uid: User and group that own it; None for those of this process.
        """
        path = self._worlds / secrets.token_hex(8)
        path.mkdir(0o700)
        if uid is not None:
            os.chown(path, uid, uid)
        return str(path)

    def remove_worlds(self) -> None:
        """Remove the directories of all worlds."""
        for path in self._worlds.iterdir():
            remove_tree(path)

    def save(self, world: str) -> str:
        """Store a copy of a world's directory, and return the id of the snapshot.

        Args:
            world: Path of the directory.

        Raises:
            CapacityError: The snapshots would take too much space.
            OSError: The directory cannot be copied.
        """
        with open_folder(world) as source:
            snapshot = self._reserve(measure_and_fix_modes(source, self.max_size).size)
            path = self._snapshots / snapshot
            partial = path.with_suffix(_PARTIAL)
            try:
                partial.mkdir(0o700)
                with open_folder(partial) as target:
                    copy_tree(source, target, self.max_size)
                partial.rename(path)
            except BaseException:
                remove_tree(partial)
                self.delete(snapshot)
                raise
        return snapshot

    def load(self, snapshot: str, world: str, uid: int | None) -> None:
        """Copy a snapshot into an empty directory of a world.

        Args:
            snapshot: Id of the snapshot.
            world: Path of the directory.
            uid: User and group that own the copies; None for those of this process.

        Raises:
            InputError: There is no such snapshot, or it is deleted meanwhile.
            OSError: The directory cannot be copied.
        """
        missing = InputError(f"there is no snapshot {snapshot!r:.60}; replay the actions")
        if snapshot not in self._sizes:
            raise missing
        path = self._snapshots / snapshot
        try:
            with open_folder(path) as source, open_folder(world) as target:
                copy_tree(source, target, self.max_size, uid)
        except OSError:
            if snapshot in self._sizes and path.exists():
                raise
            raise missing from None
        if snapshot not in self._sizes:  # so the copy may be a part
            raise missing

    def delete(self, snapshot: str) -> None:
        """Delete a snapshot. An unknown id does nothing."""
        with self._lock:
            size = self._sizes.pop(snapshot, None)
            self._created.discard(snapshot)
        if size is None:
            return
        path = self._snapshots / snapshot
        with suppress(FileNotFoundError):
            path.rename(path.with_suffix(_PARTIAL))  # so that no half of it is ever restored
        remove_tree(path.with_suffix(_PARTIAL))
        with self._lock:
            self._free_bytes += size

    def delete_older(self, keep: Collection[str]) -> int:
        """Delete the snapshots of earlier storages, other than those to keep; return how many."""
        with self._lock:
            older = self._sizes.keys() - self._created - set(keep)
        for snapshot in older:
            self.delete(snapshot)
        return len(older)

    def close(self, keep: Collection[str] = ()) -> None:
        """Delete the snapshots of this object, and the directories that are empty then.

        Args:
            keep: Ids of snapshots that stay.
        """
        with self._stack:
            for snapshot in self._created - set(keep):
                self.delete(snapshot)

    def _reserve(self, size: int) -> str:
        with self._lock:
            if size > self._free_bytes:
                raise CapacityError(
                    f"a new snapshot needs {size:,} bytes, but the {len(self._sizes):,} stored "
                    f"snapshots leave only {self._free_bytes:,}; raise {arg('max_snapshot_bytes')}"
                )
            self._free_bytes -= size
            snapshot = secrets.token_hex(8)
            self._sizes[snapshot] = size
            self._created.add(snapshot)
        return snapshot

    def _leave(self, path: Path) -> None:
        """Remove everything but snapshots from a directory that the caller chose."""
        remove_tree(path / "worlds")
        with suppress(OSError):
            (path / "snapshots").rmdir()
            (path / _MARKER).unlink()


def _lock_folder(path: Path, stack: ExitStack) -> None:
    """Create a directory, or take over one of an earlier storage; hold its lock.

    Args:
        path: The directory.
        stack: Releases the lock, and removes the directory if it is new and empty.

    Raises:
        InputError: Another process uses the directory, or it has other files.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o711)
            stack.callback(_remove_empty, path)
        fd = stack.enter_context(open_folder(path))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_used = isinstance(error, BlockingIOError)
        reason = "another process uses this folder" if is_used else error.strerror
        raise InputError(
            f"cannot store snapshots in {path}: {reason}; use another {arg('folder')}"
        ) from None
    names = os.listdir(fd)
    if names and _MARKER not in names:
        raise InputError(
            f"{path} contains files that treegen did not create; use a new {arg('folder')}"
        )


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _check_kinds(folder: Path) -> None:
    """Raise InputError if the marker is no file, or "worlds" or "snapshots" is no directory.

    The folder may come from somebody else, and treegen removes files below it.
    """
    for name, is_kind, kind in (
        (_MARKER, stat.S_ISREG, "not a file"),
        ("worlds", stat.S_ISDIR, "not a folder"),
        ("snapshots", stat.S_ISDIR, "not a folder"),
    ):
        with suppress(FileNotFoundError):
            if not is_kind(mode := os.lstat(folder / name).st_mode):
                symlink = "a symbolic link, which treegen does not follow" * stat.S_ISLNK(mode)
                raise InputError(
                    f"{folder / name} is {symlink or kind}; remove {name}, or use another "
                    f"{arg('folder')}"
                )


def _list_entries(folder: Path, form: str) -> list[Path]:
    """Return the folders in a folder.

    Args:
        folder: The folder, which may be missing.
        form: Regular expression of their names.

    Raises:
        InputError: Another file, or a folder with another name, is in the folder.
    """
    paths = [*folder.iterdir()] if folder.is_dir() else []
    for path in paths:
        if not re.fullmatch(form, path.name) or not stat.S_ISDIR(os.lstat(path).st_mode):
            raise InputError(
                f"{_show(path)} was not created by treegen; move this entry out of the folder, or "
                f"use another {arg('folder')}"
            )
    return paths


def _show(path: str | Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _measure(snapshot: Path) -> int:
    """Return the bytes of a stored snapshot."""
    try:
        with open_folder(snapshot) as inside:
            return measure_and_fix_modes(inside, _UNLIMITED).size
    except DirectoryLimitError as error:
        raise InputError(f"the snapshot {snapshot} has {error}; remove the snapshot") from None


def _try_reflinks(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as first, tempfile.TemporaryFile(dir=folder) as second:
        first.write(b"x" * 4096)
        first.flush()
        return clone(first.fileno(), second.fileno())
