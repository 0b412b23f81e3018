"""Copies, measures and removes directories in which a model's programs wrote files.

No function leaves the directory through a symbolic link, so nothing outside of the directory is
read or changed. Nothing else may change the directory meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from treegen.tasks.sandbox.seccomp import syscall

MAX_DEPTH: Final = 32
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPENAT2: Final = 437  # number of the system call on all machines
_BENEATH: Final = 0x01 | 0x02 | 0x08  # RESOLVE_NO_XDEV, _NO_MAGICLINKS, _BENEATH
_FICLONE: Final = 0x40049409
_CHUNK: Final = 1 << 30


class DirectoryLimitError(Exception):
    """A directory has too many files, too many bytes, or is nested too deeply."""


@dataclass(slots=True)
class DirectorySize:
    """Number of files (directories and links included) and bytes of a directory."""

    files: int = 0
    size: int = 0

    def add(self, status: os.stat_result, max_size: DirectorySize) -> None:
        """Count a file.

        Args:
            status: Status of the file.
            max_size: The limits.

        Raises:
            DirectoryLimitError: A limit is exceeded.
        """
        self.files += 1
        # A hole has a size and no blocks; space beyond the end of a file has blocks and no size.
        self.size += max(status.st_size, 512 * status.st_blocks)
        if self.files > max_size.files:
            raise DirectoryLimitError(f"more than {max_size.files:,} files")
        if self.size > max_size.size:
            raise DirectoryLimitError(f"more than {max_size.size:,} bytes in files")


@contextmanager
def open_folder(path: str | os.PathLike[str], above: int | None = None) -> Iterator[int]:
    """Open a directory; a symbolic link is an error.

    Args:
        path: The directory.
        above: Descriptor of the directory above it; None for an absolute path.

    Raises:
        OSError: The directory cannot be opened.
    """
    fd = os.open(path, _FOLDER, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a path below a directory. Symbolic links may lead to other paths below it only.

    Raises:
        OSError: The path cannot be opened. The error number is EXDEV if it leads outside.
        ValueError: No file can have the name.
    """
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("a path must not contain null characters")
    how = struct.pack("=QQQ", flags | os.O_NONBLOCK | os.O_CLOEXEC, 0, _BENEATH)
    arguments = (ctypes.c_int(folder), ctypes.c_char_p(name), ctypes.c_char_p(how))
    return syscall(_OPENAT2, "openat2", *arguments, ctypes.c_size_t(len(how)))


def read_beneath(folder: int, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file below a directory.

    Args:
        folder: Descriptor of the directory.
        path: The file. Symbolic links may lead to other files below the directory only.
        max_bytes: Maximum number of bytes; the rest is left out.

    Raises:
        OSError: The file cannot be read, or is no regular file (EINVAL).
        ValueError: No file can have the name.
    """
    with open(_open_beneath(folder, path, os.O_RDONLY), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, os.strerror(number), path)
        return file.read(max_bytes)


def write_beneath(folder: int, path: str, data: bytes, uid: int | None = None) -> None:
    """Create or replace a file below a directory, and create the directories above it.

    A symbolic link at the path itself is replaced, and so is a file that has several hard links.

    Args:
        folder: Descriptor of the directory.
        path: The file.
        data: Its new content.
        uid: User and group of what is created; None for those of this process.

    Raises:
        OSError: The file cannot be written.
        ValueError: No file can have the name.
    """
    *above, name = path.split("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    parent = _open_beneath(folder, ".", _FOLDER)
    try:
        for index, part in enumerate(above):
            if part:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=parent)
                    if uid is not None:
                        os.chown(part, uid, uid, dir_fd=parent, follow_symlinks=False)
            inner = _open_beneath(folder, "/".join(above[: index + 1]) or "/", os.O_DIRECTORY)
            os.close(parent)
            parent = inner
        mode = 0o600
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            mode = stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else mode
        new = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            with open(os.open(new, flags, 0o600, dir_fd=parent), "wb") as file:
                file.write(data)
                if uid is not None:
                    os.fchown(file.fileno(), uid, uid)
                os.fchmod(file.fileno(), mode)
            os.rename(new, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(new, dir_fd=parent)
            raise
    finally:
        os.close(parent)


def list_tree(folder: int) -> list[str]:
    """Return the paths of all files below a directory; those of directories end with a slash."""
    paths = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                paths.append(f"{entry.name}/")
                with open_folder(entry.name, folder) as inner:
                    paths += [f"{entry.name}/{path}" for path in list_tree(inner)]
            else:
                paths.append(entry.name)
    return paths


def measure_and_fix_modes(folder: int, max_size: DirectorySize) -> DirectorySize:
    """Measure a directory, and make all files readable by their owner.

    Programs can create files that even their owner cannot read, and with bits such as setuid.

    Args:
        folder: Descriptor of the directory.
        max_size: The limits.

    Raises:
        DirectoryLimitError: A limit is exceeded, or a directory cannot be listed by its owner.
    """
    usage = DirectorySize()
    _measure_and_fix_modes(folder, max_size, usage, 0)
    return usage


def _measure_and_fix_modes(
    folder: int, max_size: DirectorySize, usage: DirectorySize, depth: int
) -> None:
    if depth > MAX_DEPTH:
        raise DirectoryLimitError(f"directories nested more than {MAX_DEPTH} deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            usage.add(status, max_size)
            mode = stat.S_IMODE(status.st_mode)
            is_folder = stat.S_ISDIR(status.st_mode)
            if is_folder and mode & 0o500 != 0o500:
                raise DirectoryLimitError(f"a directory of mode {mode:o}, which cannot be listed")
            expected_mode = mode & 0o777 | (0 if is_folder else 0o400)
            if mode != expected_mode and (is_folder or stat.S_ISREG(status.st_mode)):
                os.chmod(entry.name, expected_mode, dir_fd=folder)
            if is_folder:
                with open_folder(entry.name, folder) as inner:
                    _measure_and_fix_modes(inner, max_size, usage, depth + 1)


def copy_tree(
    source: int, target: int, max_size: DirectorySize, uid: int | None = None
) -> DirectorySize:
    """Copy the content of a directory to an empty directory.

    Modes, symbolic links, and hard links within the directory are kept. Devices, sockets and named
    pipes are left out.

    Args:
        source: Descriptor of the directory.
        target: Descriptor of the empty one.
        max_size: The limits.
        uid: User and group that will own the copies; None for those of this process.

    Returns:
        The number of copied files and bytes.

    Raises:
        DirectoryLimitError: A limit is exceeded.
        OSError: A file cannot be read or written.
    """
    copy = _Copy(target, max_size, uid)
    copy.copy_folder(source, target, "", 0)
    return copy.usage


class _Copy:
    """A copy in progress."""

    def __init__(self, root: int, max_size: DirectorySize, uid: int | None) -> None:
        self.usage = DirectorySize()
        self._root, self._max_size, self._uid = root, max_size, uid
        self._paths: dict[tuple[int, int], str] = {}  # of files with several hard links

    def copy_folder(self, source: int, target: int, above: str, depth: int) -> None:
        """Copy the content of a directory.

        Args:
            source: Descriptor of the directory.
            target: Descriptor of its copy.
            above: Path of the directory below the root, with a slash at its end; empty for the
                root.
            depth: Number of directories above it.
        """
        if depth > MAX_DEPTH:
            raise DirectoryLimitError(f"directories nested more than {MAX_DEPTH} deep")
        for name in os.listdir(source):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            self.usage.add(status, self._max_size)
            mode = stat.S_IMODE(status.st_mode) & 0o777
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                with open_folder(name, source) as inner, open_folder(name, target) as copy:
                    self.copy_folder(inner, copy, f"{above}{name}/", depth + 1)
                    self._finish(copy, mode)
            elif stat.S_ISREG(status.st_mode):
                first = self._paths.setdefault((status.st_dev, status.st_ino), above + name)
                if first == above + name:
                    self._copy_file(source, target, name, mode)
                else:
                    os.link(first, name, src_dir_fd=self._root, dst_dir_fd=target)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                if self._uid is not None:
                    os.chown(name, self._uid, self._uid, dir_fd=target, follow_symlinks=False)

    def _copy_file(self, source: int, target: int, name: str, mode: int) -> None:
        old = os.open(name, os.O_RDONLY | _FILE, dir_fd=source)
        try:
            new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=target)
            try:
                if not clone(old, new):
                    offset = 0
                    while sent := os.sendfile(new, old, offset, _CHUNK):
                        offset += sent
                self._finish(new, mode)
            finally:
                os.close(new)
        finally:
            os.close(old)

    def _finish(self, fd: int, mode: int) -> None:
        if self._uid is not None:
            os.fchown(fd, self._uid, self._uid)
        os.fchmod(fd, mode)  # after the change of owner, which resets some bits


def clone(source: int, target: int) -> bool:
    """Let a new file share the blocks of another ("reflink"); return False if it cannot.

    Args:
        source: Descriptor of the file.
        target: Descriptor of the new file.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return False
    return True


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory and everything below it, however deep; a missing directory is no error.

    Raises:
        OSError: Something cannot be removed.
    """
    try:
        with open_folder(path) as folder:
            while names := os.listdir(folder):
                for name in names:
                    _remove(folder, name)
        os.rmdir(path)
    except FileNotFoundError:
        return


def _remove(folder: int, name: str) -> None:
    """Remove an entry of a directory; move the directories inside it up, so none is deep."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return
    os.chmod(name, 0o700, dir_fd=folder)
    with open_folder(name, folder) as inner:
        for below in os.listdir(inner):
            if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                os.chmod(below, 0o700, dir_fd=inner)  # it must be writable to be moved
                os.rename(below, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=folder)
            else:
                os.unlink(below, dir_fd=inner)
    os.rmdir(name, dir_fd=folder)
