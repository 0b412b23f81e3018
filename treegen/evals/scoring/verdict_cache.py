"""A cache of verdicts on large runs, so that a run is scored once and not at each reading.

The cache is in the user's own folder, never in the run: a run may come from somebody else, and
files in it other than its samples must not decide the verdicts. The name of a file is a hash of
everything that its verdicts depend on: the bytes of the samples, the problems, the task with its
arguments, treegen's code and the libraries that tasks use. So any change is a cache miss, a corrupt
file counts as one, and files are never updated.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from treegen.common.files import read_bytes, replace_file
from treegen.evals.job import Job
from treegen.evals.registry import is_builtin_task
from treegen.evals.verdict import Verdict
from treegen.runs import RunDir
from treegen.runs.files import parse_json

FOLDER: Final = "TREEGEN_CACHE"
"""The environment variable with the absolute path of the folder. If it is empty or a relative path,
nothing is cached."""

_MIN_CACHED_SAMPLES: Final = 1000  # in smaller runs, scoring again is as fast as reading a cache
_MAX_BYTES: Final = 1 << 28
_MAX_FILES: Final = 4096
_ENDING: Final = ".verdicts"
_LIBRARIES: Final = ("langdetect", "latex2sympy2-extended", "math-verify", "nltk", "numpy", "sympy")
# Subpackages of treegen whose code verdicts depend on.
_PACKAGES: Final = ("common", "evals", "tasks")

_Verdicts = Mapping[str, Verdict]


class VerdictCache:
    """The cached verdicts on the samples of a run."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._folder = folder
        self._of = hash_content(job)
        self._filters = tuple(job.task.filters)

    @classmethod
    def of(cls, job: Job, run: RunDir, *, any_run: bool = False) -> "VerdictCache | None":
        """Return the cache of a run; None if it has none.

        Runs of custom tasks have no cache, because their code is not known.

        Args:
            job: The job of the run.
            run: The run.
            any_run: Whether small and unfinished runs have a cache, too.
        """
        if not is_builtin_task(job.settings.task):
            return None
        if not any_run and (len(run.done) < _MIN_CACHED_SAMPLES or run.missing > 0):
            return None
        folder = _folder()
        return None if folder is None else cls(job, folder)

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no file of any run, so that the digest of samples is not needed."""
        with suppress(OSError):
            return not any(name.endswith(_ENDING) for name in os.listdir(self._folder))
        return True

    def read(self, digest: str) -> list[_Verdicts | None] | None:
        """Return the cached verdicts on each sample, in the order of the file; None for a miss.

        A sample whose scoring had failed has None.

        Args:
            digest: Hash of the samples.
        """
        path = self._path(digest)
        try:
            text = read_bytes(path)
            os.utime(path)
            checksum, _, content = text.partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode("ascii") != checksum:
                return None
            stored = parse_json(content.decode("ascii"))
        except (OSError, ValueError):
            return None
        verdicts = [Verdict(*fields) for fields in stored["verdicts"]]
        by_filter = [
            dict(zip(self._filters, map(verdicts.__getitem__, indices), strict=True))
            for indices in stored["found"]
        ]
        return [None if index is None else by_filter[index] for index in stored["samples"]]

    def write(self, digest: str, verdicts: Sequence[_Verdicts | None]) -> None:
        """Store the verdicts on each sample, unless a verdict has another class than `Verdict`.

        Args:
            digest: Hash of the samples.
            verdicts: The verdicts on each sample by filter, in the order of the file; equal ones
                are one object. None for a sample whose scoring failed.
        """
        distinct: dict[Verdict, int] = {}
        index_of: dict[int, int] = {}
        by_filter: list[list[int]] = []
        for sample_verdicts in verdicts:  # equal verdicts are one object
            if sample_verdicts is None or id(sample_verdicts) in index_of:
                continue
            if tuple(sample_verdicts) != self._filters or {
                *map(type, sample_verdicts.values())
            } != {Verdict}:
                return
            index_of[id(sample_verdicts)] = len(by_filter)
            by_filter.append(
                [distinct.setdefault(v, len(distinct)) for v in sample_verdicts.values()]
            )
        content = json.dumps(
            {
                "verdicts": [[v.answer, v.correct, v.credit] for v in distinct],
                "found": by_filter,
                "samples": [None if v is None else index_of[id(v)] for v in verdicts],
            },
            separators=(",", ":"),
        ).encode("ascii")
        path = self._path(digest)
        with suppress(OSError):  # the disk may be full, or the folder not writable
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replace_file(path) as file:
                file.write(b"%b\n%b" % (hashlib.sha256(content).hexdigest().encode(), content))
            _evict_old_files(self._folder)

    def _path(self, digest: str) -> Path:
        key = hashlib.sha256(f"{self._of}{digest}".encode("ascii"))
        return self._folder / f"{key.hexdigest()}{_ENDING}"


def _folder() -> Path | None:
    """Return the folder of the cache; None if nothing is cached."""
    named = os.environ.get(FOLDER)
    if named is None:
        above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        named = os.path.join(above, "treegen")
    return Path(named) if os.path.isabs(named) else None


def hash_content(job: Job) -> str:
    """Return a hash of everything that verdicts depend on, except the samples."""
    return hashlib.sha256(_content(job).encode("ascii")).hexdigest()


def _content(job: Job) -> str:
    """Return everything that verdicts depend on, except the samples, as JSON."""
    data, options = job.data, job.settings.options
    return json.dumps(
        [
            [_code(), sys.version, *library_versions().values()],
            [job.task.name, job.task.version, *job.task.filters],
            [data.fingerprint, options.split, dict(options.extra)],
            [[dict(problem.metadata), problem.group] for problem in data.problems],
        ],
        sort_keys=True,
        default=repr,
    )


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a hash of the code that scores, because the code of a checkout may change."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        folder = Path(__file__).parents[2] / package
        for path in sorted(folder.rglob("*.py")):
            name = os.fsencode(path.relative_to(folder))
            digest.update(b"%b\0%b\0" % (name, hashlib.sha256(path.read_bytes()).digest()))
    return digest.hexdigest()


def library_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that scorers use, by name; None if not installed."""
    return {library: _version(library) for library in _LIBRARIES}


def _version(library: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(library)
    return None


def _evict_old_files(folder: Path) -> None:
    """Remove the least recently used files until the folder is within its limit."""
    files: list[tuple[Any, Path]] = [(path.stat(), path) for path in folder.glob(f"*{_ENDING}")]
    size, num = sum(about.st_size for about, _ in files), len(files)
    for about, path in sorted(files, key=lambda entry: (entry[0].st_mtime_ns, entry[1])):
        if size <= _MAX_BYTES and num <= _MAX_FILES:
            return
        path.unlink(missing_ok=True)
        size, num = size - about.st_size, num - 1
