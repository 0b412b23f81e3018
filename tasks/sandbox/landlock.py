"""Landlock rules, by which the kernel limits what a process may open, without root or mounts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from treegen.tasks.sandbox.seccomp import PR_SET_NO_NEW_PRIVS, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, with the same numbers on all machines

_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 12
_MAKE_REG, _REFER, _TRUNCATE = 1 << 8, 1 << 13, 1 << 14
_READ_ACCESS = _EXECUTE | _READ | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE
# Number of kinds of file access in each version of Landlock, from version 1 (Linux 5.13).
_NUM_RIGHTS: Final = (13, 14, 15, 15, 16)


def version() -> int:
    """Return the version of Landlock that the kernel offers; 0 for none."""
    try:
        return syscall(_CREATE, "landlock_create_ruleset", None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def create_ruleset(
    read: Sequence[str],
    hidden: Sequence[str],
    shown: Sequence[str],
    devices: Sequence[str],
    scratch: str,
    *,
    is_flat: bool = True,
) -> int:
    """Return a descriptor of rules, which forbid all access to files that they do not allow.

    They allow sockets and devices to be created nowhere, not even in `scratch`.

    Args:
        read: Everything below these paths may be read.
        hidden: Files below these may not be read, but their names may.
        shown: Everything below these may be read, even if it is below a hidden path.
        devices: Devices that may be read and written.
        scratch: Directory in which files may be created and written.
        is_flat: Whether to forbid creating directories and links in `scratch`, and removing files.
            A listing then shows everything that the program stored. Default: True.
    """
    abi = version()
    rights = (1 << _NUM_RIGHTS[min(abi, len(_NUM_RIGHTS)) - 1]) - 1
    network = 3 if abi >= 4 else 0  # TCP bind and connect
    scope = 3 if abi >= 6 else 0  # abstract sockets, signals
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("=QQQ", rights, network, scope)[:size]
    rules = syscall(
        _CREATE,
        "landlock_create_ruleset",
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
        0,
    )
    for path in shown:
        _allow(rules, path, _READ_ACCESS)
    for path, right in _iter_allowed_paths(read, hidden):
        with contextlib.suppress(FileNotFoundError):  # gone since the directory was listed
            _allow(rules, path, right)
    for path in devices:
        _allow(rules, path, (_READ | _WRITE | _TRUNCATE) & rights)
    inside = _READ | _WRITE | _READ_DIR | _MAKE_REG | _TRUNCATE
    if not is_flat:
        inside |= _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_SYM | _REFER
    _allow(rules, scratch, inside & rights)
    return rules


def restrict(rules: int) -> None:
    """Restrict this process by the rules, permanently, and close their descriptor."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_RESTRICT, "landlock_restrict_self", ctypes.c_int(rules), 0)
    os.close(rules)


def _iter_allowed_paths(paths: Sequence[str], hidden: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (path, right) to allow, so that everything below `paths` can be read except `hidden`.

    A right holds for everything below a path, and no rule can take it away. So above a hidden path,
    directories can only be listed, and each of their other entries gets the right to be read.
    """
    for path in paths:
        if os.path.islink(path) or path in hidden:  # the target of a link has a rule of its own
            continue
        if any(inside.startswith(path + "/") for inside in hidden):
            yield path, _READ_DIR
            yield from _iter_allowed_paths(
                [os.path.join(path, name) for name in os.listdir(path)], hidden
            )
        else:
            yield path, _READ_ACCESS


def _allow(rules: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, handle)
        syscall(_ADD, "landlock_add_rule", ctypes.c_int(rules), 1, ctypes.c_char_p(rule), 0)
    finally:
        os.close(handle)
