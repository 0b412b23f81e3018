"""The Python runtime that sandboxed programs may read, and the signals that end processes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from treegen.errors import InputError
from treegen.tasks.sandbox.programs import HelperKilledError, SandboxError

_T = TypeVar("_T")
_ATTEMPTS = 3
_TIMEOUT_SECONDS = 60.0  # for a program outside the sandbox
EXTERNAL_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""Signals that a user, a supervisor or the kernel's out-of-memory killer sends. A sandbox that does
not work ends its helper by other signals, such as SIGSYS."""


def signal_of(code: int) -> int:
    """Return the signal that ended a process; 0 if it ended by itself.

    Args:
        code: Return code from `subprocess`. bwrap adds 128 to the signal that ended its child.
    """
    return -code if code < 0 else max(code - 128, 0)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_unconfined(
    command: Sequence[str], env: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program of treegen's own outside the sandbox.

    Args:
        command: The program and its arguments.
        env: The environment variables.
        stdin: The standard input.

    Raises:
        HelperKilledError: The program did not end in time, so treegen has killed it.
    """
    try:
        return subprocess.run(
            command,
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise HelperKilledError(
            f"a test program of the sandbox did not end within {_TIMEOUT_SECONDS:g} s; try again "
            "on a machine with less load"
        ) from None


def retry_if_killed(check: Callable[[], _T]) -> _T:
    """Return the result of a check; repeat the check if something kills its processes.

    Raises:
        HelperKilledError: The processes were killed each time.
        SandboxError: The sandbox does not hold, or does not work here.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(HelperKilledError):
            return check()
    try:
        return check()
    except HelperKilledError as error:
        reason = str(error).partition(";")[0]
        raise HelperKilledError(
            f"no sandbox could be tested: {reason}, {_ATTEMPTS} times in a row; check what ends "
            "processes on this machine (dmesg shows the out-of-memory killer), and try again"
        ) from error


# The helper imports these once, so that programs get them without cost.
_PRELOAD: Final = """
abc array bisect cmath collections collections.abc contextlib copy ctypes dataclasses datetime
decimal enum fractions functools heapq io itertools json math numbers operator os queue random re
statistics string struct sys threading time traceback typing
"""
PRELOAD: Final = tuple(_PRELOAD.split())
# /dev/zero is left out: a shared mapping of it is memory that no limit counts.
DEVICES: Final = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
# Packages are installed here, and may include tests and expected answers.
_PACKAGES: Final = ("site-packages", "dist-packages")
# Prints the directories of the standard library and of every shared library in use, which may lie
# outside of the system's directories.
_PROBE: Final = (
    "import importlib,os,sys\n"
    "for name in [*sys.argv[1:], 'ssl', 'sqlite3', 'zlib', 'bz2', 'lzma']:\n"
    "    try: importlib.import_module(name)\n"
    "    except ImportError: pass\n"
    "print(*sys.path, sep='\\n')\n"
    "for line in open('/proc/self/maps'):\n"
    "    if '.so' in line: print(os.path.dirname(line.split(maxsplit=5)[5]))\n"
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The interpreter and the paths that programs may read."""

    python: str
    """The path of the interpreter."""
    read: tuple[str, ...]
    """Files and directories; programs may read everything below them."""
    hidden: tuple[str, ...]
    """Directories below `read` that programs may not read."""
    shown: tuple[str, ...]
    """Directories below `hidden` that programs may read nevertheless."""
    library_path: str
    """Directory of the interpreter's own library if it is in no standard place."""
    packages: tuple[str, ...]
    """The extra packages that programs may import."""
    packages_path: tuple[str, ...]
    """The directories that contain these packages."""

    @property
    def keep_read(self) -> bool:
        """Whether only root can reach some of the files."""
        return any(not is_reachable(path) for path in self.read + self.shown)


@functools.cache
def find_runtime(packages: tuple[str, ...] = ()) -> Runtime:
    """Find the files that the base interpreter of this process needs, with some extra packages.

    Raises:
        InputError: A package is not installed, or a name is not that of a whole package.
        SandboxError: The interpreter does not run.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library_path = ""
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        library_path = str(sysconfig.get_config_var("LIBDIR"))
    candidates = [path for path in _SYSTEM if os.path.exists(path)]
    candidates += [python, "/etc/ld.so.cache", *retry_if_killed(lambda: _find_library_dirs(python))]
    candidates += [os.path.realpath(path) for path in candidates]
    read = _outermost([path for path in candidates if os.path.exists(path)])
    package_paths = [path for name in packages for path in _find_package_dirs(name)]
    sites = dict.fromkeys(os.path.dirname(path) for path in package_paths)
    hidden = _find_hidden(read)
    return Runtime(
        python,
        tuple(read),
        tuple(hidden),
        tuple(package_paths),
        library_path,
        packages,
        tuple(sites),
    )


def _find_hidden(roots: Sequence[str]) -> list[str]:
    """Return the directories below `roots` with installed packages, treegen's among them."""
    paths = [str(Path(file).parents[2]) for file in (__file__, os.path.realpath(__file__))]
    pending = [root for root in roots if not os.path.islink(root)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name in _PACKAGES:
                    paths += [entry.path, os.path.realpath(entry.path)]
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    inside = [path for path in paths if any(path.startswith(root + "/") for root in roots)]
    return _outermost([path for path in inside if not os.path.islink(path)])


def _find_library_dirs(python: str) -> list[str]:
    """Return the directories of the standard library and of the shared libraries in use."""
    command = [python, "-s", "-S", "-P", "-B", "-c", _PROBE, *PRELOAD]
    # Keep the caller's library path: without it the interpreter may not start at all.
    keep = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
    done = run_unconfined(command, keep)
    if done.returncode:
        ended = signal_of(done.returncode)
        reason = (
            f"was ended by {signal_name(ended)}"
            if ended
            else f"failed: {done.stderr[-300:].strip()}"
        )
        kind = HelperKilledError if ended in EXTERNAL_SIGNALS else SandboxError
        raise kind(
            f"the Python interpreter of the sandbox, {python}, {reason}; check that this "
            "interpreter runs, and try again"
        )
    return [line for line in done.stdout.splitlines() if line.startswith("/")]


def _find_package_dirs(name: str) -> list[str]:
    """Return the directories of an installed package and of its wheel's libraries."""
    package, dot, _ = name.partition(".")
    if dot:
        raise InputError(
            f"packages must contain names of whole packages, got {name!r}; pass {package!r}"
        )
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"package {name!r} is not installed; install the package, or remove {name!r} from "
            "packages"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return [str(path) for path in (folder, folder.with_name(f"{name}.libs")) if path.exists()]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Drop paths inside other paths of the list; symbolic links such as /lib stay."""
    unique = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    folders = [path for path in unique if not os.path.islink(path)]
    return [
        path
        for path in unique
        if not any(other != path and path.startswith(other + "/") for other in folders)
    ]


def is_reachable(path: str) -> bool:
    """Return whether every user may pass through all directories above a path."""
    parents = Path(os.path.realpath(path)).parents
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)
