"""Confines a freshly forked child before it runs a program."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
from collections.abc import Mapping
from typing import Any, Final

from treegen.tasks.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_CAP_DAC_READ_SEARCH: Final = 1 << 2
_CAPABILITY_VERSION: Final = 0x20080522
_MAIN_STACK: Final = 128 << 20  # the kernel reserves this much below the stack anyway


def confine(
    setup: Mapping[str, Any],
    limits: Mapping[str, Any],
    code: bytes | None,
    rules: int | None,
    parent: int,
) -> None:
    """Give up every right that the program must not have.

    Args:
        setup: The helper's setup, as `tiers` builds it: "uid", "keep_read" and "other_threads" are
            read.
        limits: Limits of the program, by their names in `Limits`.
        code: The filter of system calls, if any.
        rules: The descriptor of Landlock's rules, if any.
        parent: The process id of the helper.

    Raises:
        OSError: A right cannot be given up.
    """
    if setup["uid"] is not None:
        _become(setup["uid"], keep_read=setup["keep_read"])
    # Set these after the change of user, which resets both.
    seccomp.prctl(_PR_SET_DUMPABLE, 0)
    seccomp.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the helper died before its death could end this process
        os.kill(os.getpid(), signal.SIGKILL)
    if rules is not None:
        landlock.restrict(rules)
    _limit(setup, limits)
    if code is not None:
        seccomp.install(code, os.getpid())


def _become(uid: int, *, keep_read: bool) -> None:
    """Change from root to a user that owns nothing.

    Args:
        uid: Id of the user.
        keep_read: Keep the right to read past file modes, for an interpreter below a directory that
            only root can enter (such as /root/.pyenv). This is safe only with Landlock, which then
            decides what may be read.
    """
    if keep_read:
        seccomp.prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_read:
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        data = struct.pack("=6I", _CAP_DAC_READ_SEARCH, _CAP_DAC_READ_SEARCH, 0, 0, 0, 0)
        result = seccomp.libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(data))
        seccomp.check(result, "capset")


def _limit(setup: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    cpu = math.ceil(limits["cpu_seconds"]) + 1
    hard = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_CPU: cpu,  # the helper stops it earlier; this works if the helper died
        resource.RLIMIT_FSIZE: limits["scratch"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_NPROC: setup["other_threads"] + limits["threads"],
    }
    for what, limit in hard.items():
        ceiling = resource.getrlimit(what)[1]
        if ceiling != resource.RLIM_INFINITY:
            limit = min(limit, ceiling)
        resource.setrlimit(what, (limit, limit))
    # Only the soft limit is set, because programs may raise it. Setting it now does not change the
    # default stack size of threads, which was read when Python started. RLIMIT_AS limits stacks
    # too.
    ceiling = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _MAIN_STACK if ceiling == resource.RLIM_INFINITY else min(_MAIN_STACK, ceiling)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, ceiling))
