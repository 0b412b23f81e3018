"""The stored responses of a run of lm-eval, in a directory from which the run is resumed.

    DIR/<model>/model.json      what the responses depend on, apart from their requests
    DIR/<model>/samples.jsonl   generated samples, appended as they finish
    DIR/<model>/scores.jsonl    log-likelihoods, likewise
    DIR/<model>/run.lock        held by the one process that appends

The key of a response is a hash of its request's tokens and settings, so one directory serves any
tasks, limits and models.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from treegen.runs import Key, RecordFile, open_for_append
from treegen.runs.files import Lock, write_json
from treegen.runs.new_directory import NewDirectory

Kind = Literal["samples", "scores"]
_LOCK: Final = "run.lock"

_log = logging.getLogger(__name__)


class Journal:
    """The responses of one model in a directory."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """Create the model's folder in an existing directory.

        Args:
            directory: The directory.
            identity: Everything that a response depends on, apart from its request.

        Raises:
            RunError: The folder cannot be created, or is in use.
        """
        text = json.dumps(identity, sort_keys=True)
        self._folder = directory / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        NewDirectory.directory(self._folder)
        with Lock(self._folder / _LOCK):
            if not (self._folder / "model.json").exists():
                write_json(self._folder / "model.json", identity)

    @contextmanager
    def open(self, kind: Kind) -> Iterator[RecordFile]:
        """Open and lock the file of the responses of one kind, to read it and to append to it.

        Raises:
            RunError: Another process holds it, or it is damaged or cannot be written.
        """
        with open_for_append(self._folder / f"{kind}.jsonl", _LOCK) as file:
            for notice in file.notices:
                _log.warning("%s: %s", self._folder, notice)
            yield file


def read_stored(file: RecordFile, wanted: Collection[Key]) -> dict[Key, dict[str, Any]]:
    """Return the records of a file that have one of the wanted keys."""
    keys = set(wanted) & file.keys
    if not keys:
        return {}
    records = (((r["problem_id"], r["sample_index"]), r) for r in file.records())
    return {key: record for key, record in records if key in keys}
