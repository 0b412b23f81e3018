"""The answers that a run of lm-eval has so far, kept in a directory from which it is resumed.

    DIR/<model>/model.json      what the answers depend on, beside their requests
    DIR/<model>/samples.jsonl   generated samples, appended as they finish
    DIR/<model>/scores.jsonl    log-likelihoods, likewise
    DIR/<model>/run.lock        held by the one process that appends

An answer is named by a hash of its request's tokens and settings, so one directory serves any
tasks, limits and models.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from treegen.errors import RunError
from treegen.runs import Key, RecordFile
from treegen.runs.files import Lock, reason, sync_directory, write_json

Kind = Literal["samples", "scores"]

_log = logging.getLogger(__name__)


class Journal:
    """The answers of one model in a directory."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """Make the model's folder in an existing directory.

        identity: all that an answer depends on, beside its request.

        Raises:
            RunError: the folder cannot be made, or is in use.
        """
        text = json.dumps(identity, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._folder = directory / name
        make_directory(self._folder)
        with self._locked():
            if not (self._folder / "model.json").exists():
                write_json(self._folder / "model.json", identity)

    @contextmanager
    def open(self, kind: Kind) -> Iterator[RecordFile]:
        """The file of the answers of one kind, locked, to read and to append to.

        Raises:
            RunError: another process has it, or it is damaged or cannot be written.
        """
        with self._locked():
            path = self._folder / f"{kind}.jsonl"
            try:
                path.touch()
                sync_directory(self._folder)
            except OSError as error:
                raise RunError(f"cannot write {path}: {reason(error)}") from error
            file = RecordFile(path, writable=True, again="run the same command again")
            try:
                for notice in file.notices:
                    _log.warning("%s: %s", self._folder, notice)
                yield file
            finally:
                file.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = Lock(self._folder / "run.lock")
        try:
            yield
        finally:
            lock.release()


def make_directory(path: Path) -> None:
    """Make a directory and those above it.

    Raises:
        RunError: the system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the directory {path}: {reason(error)}") from error


def stored(file: RecordFile, wanted: Collection[Key]) -> dict[Key, dict[str, Any]]:
    """The records of the wanted keys that a file has."""
    keys = set(wanted) & file.keys
    if not keys:
        return {}
    found = (((r["problem_id"], r["sample_index"]), r) for r in file.records())
    return {key: record for key, record in found if key in keys}
