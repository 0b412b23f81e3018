"""The helper inside the sandbox: forks a child for each program and watches it.

It trusts its parent, and answers one message for each job. It never holds the text or the input of
a program: the parent passes these to the child as sealed descriptors. Expected outputs never enter
the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import platform
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from treegen.tasks.sandbox import child, landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_CAP_DAC_READ_SEARCH: Final = 1 << 2
_CAPABILITY_VERSION: Final = 0x20080522
_MAIN_STACK: Final = 128 << 20  # the kernel reserves this much below the stack anyway


def _confine(
    setup: Mapping[str, Any],
    limits: Mapping[str, Any],
    syscall_filter: bytes | None,
    ruleset: int | None,
    parent: int,
) -> None:
    """Give up every right that the program must not have.

    Args:
        setup: The helper's setup, as `isolation` builds it. This process reads "uid", "keep_read"
            and "other_threads".
        limits: Limits of the program, by their names in `Limits`.
        syscall_filter: The seccomp filter, if any.
        ruleset: The descriptor of Landlock's rules, if any.
        parent: The process id of the helper.

    Raises:
        OSError: A right cannot be given up.
    """
    if setup["uid"] is not None:
        _drop_root(setup["uid"], keep_read=setup["keep_read"])
    # Set these after the change of user, which resets both.
    seccomp.prctl(_PR_SET_DUMPABLE, 0)
    seccomp.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the helper died before its death could end this process
        os.kill(os.getpid(), signal.SIGKILL)
    if ruleset is not None:
        landlock.restrict(ruleset)
    _set_limits(setup, limits)
    if syscall_filter is not None:
        seccomp.install(syscall_filter, os.getpid())


def _drop_root(uid: int, *, keep_read: bool) -> None:
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


def _set_limits(setup: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
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
    for name, limit in hard.items():
        ceiling = resource.getrlimit(name)[1]
        if ceiling != resource.RLIM_INFINITY:
            limit = min(limit, ceiling)
        resource.setrlimit(name, (limit, limit))
    # Only the soft limit is set, because programs may raise it. Setting it now does not change the
    # default stack size of threads, which was read when Python started. RLIMIT_AS limits stacks
    # too.
    ceiling = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _MAIN_STACK if ceiling == resource.RLIM_INFINITY else min(_MAIN_STACK, ceiling)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, ceiling))


NUM_DESCRIPTORS = 6  # source, call, stdin, stdout, stderr, report
KILL = b"kill"
_TICK = 0.02  # seconds between checks of the limits
# Seconds between checks of files: short, because several threads fill a disk fast. Up to _TICK, the
# pause is at least _CHECK_FACTOR times as long as a check, which bounds the share of time spent.
_FILES_TICK, _CHECK_FACTOR = 0.002, 20
# A program for which all others wait may take _IDLE_SECONDS of wall time, plus _WALL_PER_CPU times
# its CPU time.
_IDLE_SECONDS, _WALL_PER_CPU = 1.0, 4
_children: list[int] = []


class _Job(NamedTuple):
    """Everything a child needs. Nothing here comes from earlier programs."""

    setup: dict[str, Any]
    limits: dict[str, Any]
    syscall_filter: bytes | None
    ruleset: int | None
    descriptors: list[int]
    parent: int


def main(descriptor: int) -> None:
    """Serve jobs until the parent hangs up. In a child, run the program of its job.

    Args:
        descriptor: The helper's end of the control socket.
    """
    # Return from serving before a program runs, because a program can read the frames above it.
    job = _serve_and_clean_up(descriptor)
    if job is not None:
        _run(job)


def _serve_and_clean_up(descriptor: int) -> _Job | None:
    control = socket.socket(fileno=descriptor)
    setup = json.loads(control.recv(1 << 16))
    # When the parent ends, clean up and end, even if another process has a copy of its socket.
    signal.signal(signal.SIGTERM, lambda *_: _stop(setup, 128 + signal.SIGTERM))
    if setup["kind"] == "folder":
        os.mkdir(setup["scratch"], 0o700)
    job = None
    try:
        job = _serve(control, setup)
    finally:  # clean up also if the parent is gone before the helper could answer
        if job is None:
            _clean_up(setup)
    return job


def _serve(control: socket.socket, setup: dict[str, Any]) -> _Job | None:
    """Serve jobs. Return None when the parent hangs up; in each child, return the child's job."""
    syscall_filter = seccomp.assemble(platform.machine()) if setup["seccomp"] else None
    ruleset = _prepare(setup)
    wake, wake_writer = os.pipe()
    for end in (wake, wake_writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own_pid = os.getpid()
    control.send(b"{}")
    gc.freeze()  # children share these pages while nothing writes to them
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, NUM_DESCRIPTORS)
        if not message:
            return None
        if message == KILL:  # the child had ended before the message arrived
            continue
        limits = json.loads(message)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            return _Job(setup, limits, syscall_filter, ruleset, descriptors, own_pid)
        _children.append(pid)
        for handle in descriptors:
            os.close(handle)
        result = _watch(pid, started, limits, setup, control, wake)
        result["dirty"] = setup["kind"] != "workspace" and _has_leftovers(setup["scratch"])
        control.send(json.dumps(result).encode())


def _prepare(setup: dict[str, Any]) -> int | None:
    """Prepare the process for all programs; return the descriptor of Landlock's rules, if any."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    seccomp.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if setup["parent"] not in (None, os.getppid()):
        sys.exit("the process that started this helper has ended")
    if setup["kind"] != "workspace":
        os.utime(setup["scratch"], (0, 0))
    if setup["uid"] is not None and setup["kind"] == "folder":
        os.chown(setup["scratch"], setup["uid"], setup["uid"])
    os.chdir(setup["scratch"])
    os.umask(0o077)
    os.environ.clear()
    for name in setup["setenv"]:
        os.environ[name] = "1"
    sys.path[:] = [path for path in sys.path if os.path.isabs(path)] + setup["packages_path"]
    for name in setup["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Loaded packages find their submodules without this path. Other packages there must look as if
    # they were not installed.
    sys.path[:] = [path for path in sys.path if path not in setup["packages_path"]]
    os.environ.clear()
    # site.main() would do this, but it must not run, because it also reads site-packages.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.argv[:] = ["program.py"]
    seccomp.prctl(_PR_SET_DUMPABLE, 0)  # so that no process can attach to this one
    os.listdir(setup["scratch"])  # sets the access time, so that later listings do not change it
    if not setup["landlock"]:
        return None
    paths = [setup[name] for name in ("read", "hidden", "shown", "devices", "scratch")]
    ruleset = landlock.create_ruleset(*paths, is_flat=setup["kind"] != "workspace")
    high = _dup_above(ruleset)  # its number must differ from those of a program's streams
    os.close(ruleset)
    return high


def _has_leftovers(scratch: str) -> bool:
    """Return whether a program left files, or created and removed some."""
    return os.stat(scratch).st_mtime_ns != 0 or bool(os.listdir(scratch))


def _run(job: _Job) -> NoReturn:
    """Run a program in this process, which is a fresh child."""
    source, call, *streams = job.descriptors
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        texts = [_read_all(handle) for handle in (source, call)]
        # Move descriptors twice, because a target may be the number of a stream not yet moved.
        high = [_dup_above(handle) for handle in streams]
        for target, handle in enumerate(high):
            os.dup2(handle, target, inheritable=False)
        end = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ruleset = end if job.ruleset is None else job.ruleset
        os.closerange(child.REPORT + 1, ruleset)
        os.closerange(ruleset + 1, end)
        sys.set_int_max_str_digits(0)  # older Pythons had no limit; CPU time bounds it
        _confine(job.setup, job.limits, job.syscall_filter, job.ruleset, job.parent)
        child.report("ready")
    except BaseException as error:
        # The report may be on either descriptor by now. The parent treats an empty report as a
        # failure.
        for target in (child.REPORT, streams[-1]):
            with contextlib.suppress(OSError):
                os.write(target, f"broken {type(error).__name__}: {error}\n".encode())
                break
        os._exit(1)
    try:
        prelude, source_text, may_return = json.loads(texts[0])
        child.run(source_text, prelude, texts[1] or None, may_return=may_return)
    finally:
        os._exit(1)  # whatever fails, a child must never continue as the helper


def _dup_above(handle: int) -> int:
    return fcntl.fcntl(handle, fcntl.F_DUPFD, 64)


def _read_all(handle: int) -> str:
    with open(handle, "rb", closefd=False) as file:
        return file.read().decode()


def _watch(
    pid: int,
    started: float,
    limits: dict[str, Any],
    setup: dict[str, Any],
    control: socket.socket,
    wake: int,
) -> dict[str, Any]:
    """Wait for the child. Kill it at the first limit that it reaches, or when the parent asks.

    Args:
        pid: Process id of the child.
        started: Time of the fork, as `time.monotonic` returns it.
        limits: Limits of the program.
        setup: The helper's setup.
        control: Socket to the parent; any message asks to kill the child.
        wake: Descriptor that becomes readable when a child ends.

    Returns:
        Exit status, CPU and wall seconds, peak resident bytes, and what killed the child (None if
        nothing did).
    """
    killed = None
    clock = (~pid << 3) | 2  # the CPU clock of that process, as clock_getcpuclockid makes it
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        now = time.monotonic()
        if done:
            _children.remove(pid)
            break
        tick = _TICK
        if killed is None:
            killed, has_files = _find_reached_limit(clock, now - started, limits, setup)
            if has_files:
                tick = max(_FILES_TICK, _CHECK_FACTOR * (time.monotonic() - now))
        if killed is not None:
            os.kill(pid, signal.SIGKILL)
        watched: list[Any] = [wake, control]
        ready, _, _ = select.select(watched, [], [], min(tick, _TICK))
        if wake in ready:
            os.read(wake, 4096)
        if control in ready:
            killed = "parent"
            if not control.recv(64):
                _stop(setup)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "wall": now - started,
        "memory": usage.ru_maxrss * 1024,
        "killed": killed,
    }


def _find_reached_limit(
    clock: int, wall: float, limits: dict[str, Any], setup: dict[str, Any]
) -> tuple[str | None, bool]:
    """Return the first limit that is reached, and whether there are files that may grow.

    Args:
        clock: CPU clock of the child.
        wall: Seconds since the start of the child.
        limits: Limits of the program.
        setup: The helper's setup.
    """
    with contextlib.suppress(OSError):  # the child may just have ended
        cpu = time.clock_gettime(clock)
        if cpu > limits["cpu_seconds"]:
            return "cpu", False
        if limits["alone"] and wall > _IDLE_SECONDS + _WALL_PER_CPU * cpu:
            return "wall", False
    if wall > limits["wall_seconds"]:
        return "wall", False
    num_files, num_bytes = _measure_scratch(setup, limits["files"])
    full = num_files > limits["files"] or num_bytes > limits["scratch"]
    return "files" if full else None, num_files > 0 and setup["kind"] != "tmpfs"


def _measure_scratch(setup: dict[str, Any], max_files: int) -> tuple[int, int]:
    """Return the number of files and of bytes in the scratch directory.

    A separate file system limits the bytes itself, and also counts files that no directory shows.
    The bytes are then returned as 0. A folder is flat and nothing in it can be removed, so a
    listing shows everything. A workspace may also have files that were removed and are still open;
    these are not counted.

    Args:
        setup: The helper's setup.
        max_files: Maximum number of files. A larger number is returned early.
    """
    if setup["kind"] == "tmpfs":
        space = os.statvfs(setup["scratch"])
        return space.f_files - space.f_ffree - 1, 0
    num_files, num_bytes = 0, 0
    folders = [setup["scratch"]]
    while folders and num_files <= max_files:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed meanwhile
                        continue
                    # Use the larger of both numbers: a hole has a size and no blocks; space
                    # allocated beyond the end of a file has blocks and no size.
                    num_bytes += max(stat.st_size, 512 * stat.st_blocks)
                    num_files += 1
                    if num_files > max_files:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed meanwhile
        except OSError:  # too deep for a path, or not readable
            return max_files + 1, num_bytes
    return num_files, num_bytes


def _stop(setup: dict[str, Any], code: int = 1) -> NoReturn:
    """End the running program and this process at once, leaving no files but a workspace's."""
    _clean_up(setup)
    os._exit(code)


def _clean_up(setup: dict[str, Any]) -> None:
    """End the running program, and remove the files that it left outside of a workspace."""
    for pid in _children:
        # The child may be gone, because this can run twice: the parent's end is noticed on the
        # socket and as a signal, which can arrive at any line.
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if setup["kind"] == "workspace":
        return
    scratch = setup["scratch"]
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(scratch, name))
        os.rmdir(scratch)
