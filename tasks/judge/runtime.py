"""What of the host a program may read: the Python runtime, and nothing else."""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treegen.errors import InputError

# Imported once in the helper, so that a program that uses them pays nothing.
PRELOAD: Final = (
    "abc",
    "array",
    "bisect",
    "cmath",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "os",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "sys",
    "threading",
    "time",
    "traceback",
    "typing",
)
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
# Prints the directories of every shared library in use, which need not be the system's.
_PROBE: Final = (
    "import importlib,sys\n"
    "for name in [*sys.argv[1:], 'ssl', 'sqlite3', 'zlib', 'bz2', 'lzma']:\n"
    "    try: importlib.import_module(name)\n"
    "    except ImportError: pass\n"
    "print('\\n'.join(line.split(maxsplit=5)[5].strip() for line in open('/proc/self/maps')"
    " if '.so' in line))\n"
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The interpreter and the directories that it reads."""

    python: str
    read: tuple[str, ...]
    library_path: str  # for an interpreter whose own library is in no standard place
    packages: tuple[str, ...]
    packages_path: tuple[str, ...]

    @property
    def keep_read(self) -> bool:
        """Whether a user other than root could not reach the interpreter."""
        return any(not _reachable(path) for path in self.read)


@functools.cache
def find_runtime(packages: tuple[str, ...] = ()) -> Runtime:
    """Find what the base interpreter of this process needs, with some extra packages."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library_path = ""
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        library_path = str(sysconfig.get_config_var("LIBDIR"))
    wanted = [path for path in _SYSTEM if os.path.exists(path)]
    wanted += [python, os.path.join(sys.base_prefix, "lib"), sysconfig.get_path("stdlib")]
    wanted += [sysconfig.get_path("platstdlib"), "/etc/ld.so.cache", *_libraries(python)]
    package_paths = [path for name in packages for path in _package(name)]
    read = [path for path in wanted + package_paths if os.path.exists(path)]
    sites = dict.fromkeys(os.path.dirname(path) for path in package_paths)
    return Runtime(python, tuple(_outermost(read)), library_path, packages, tuple(sites))


def _libraries(python: str) -> list[str]:
    command = [python, "-s", "-S", "-P", "-B", "-c", _PROBE, *PRELOAD]
    # The caller's library path, since without it this interpreter may not start at all.
    keep = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
    done = subprocess.run(
        command, env=keep, capture_output=True, text=True, check=False, timeout=60
    )
    return [os.path.dirname(line) for line in done.stdout.splitlines() if line.startswith("/")]


def _package(name: str) -> list[str]:
    """The directories of an installed package: itself and the libraries that its wheel brings."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"package {name!r} is not installed; programs cannot be given it")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return [str(path) for path in (folder, folder.with_name(f"{name}.libs")) if path.exists()]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Drop paths that lie inside others of the list; symbolic links such as /lib stay."""
    unique = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    folders = [path for path in unique if not os.path.islink(path)]
    return [
        path
        for path in unique
        if not any(other != path and path.startswith(other + "/") for other in folders)
    ]


def _reachable(path: str) -> bool:
    """Whether everybody may pass through all directories above a path."""
    parents = Path(os.path.realpath(path)).parents
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)
