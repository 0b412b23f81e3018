"""The stored verdicts on a run's samples: one file in the run directory for each way of scoring.

    verdicts-strict-1f0c8a2d.jsonl      {"problem_id": ..., "sample_index": ..., "verdict": ...}

So sampling, scoring and scoring in another way can each stop and resume at any time.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from treegen.common.files.regular_files import open_regular
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.runs import Key, RecordFile
from treegen.runs.files import Lock
from treegen.tasks.programs.outcomes import ProgramOutcome
from treegen.tasks.programs.task import ProgramTask

_VERSION: Final = 3


class VerdictFile:
    """The verdicts of one way of scoring.

    path: the file.
    """

    def __init__(self, task: ProgramTask, folder: Path, execution: ExecutionOptions | None) -> None:
        """Open the verdicts stored in a run directory, for writing if programs may run.

        Args:
            task: The task of the run.
            folder: The run directory.
            execution: How programs may run; None if they may not.
        """
        self._task, self._execution = task, execution
        self._lock: Lock | None = None
        self.path = folder / self._name()
        self._file = self._open(folder)

    def read_stored(self) -> Iterator[tuple[Key, ProgramOutcome]]:
        """Yield the stored verdicts with the keys of their samples."""
        for record in self._file.records() if self._file else ():
            key = (record.pop("problem_id"), record.pop("sample_index"))
            yield key, ProgramOutcome(**record)

    def append(self, key: Key, outcome: ProgramOutcome) -> None:
        """Store a verdict."""
        assert self._file is not None
        self._file.append({"problem_id": key[0], "sample_index": key[1], **asdict(outcome)})

    def sync(self) -> None:
        """Write stored verdicts to disk, so that they survive a loss of power."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Close the file, so that another process may write it."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def settings(self) -> dict[str, Any]:
        """Return everything that a verdict depends on, except the program and its tests."""
        task, execution = self._task, self._execution
        return {
            "judge": _VERSION,
            "comparer": task.judged_by,
            "extract": task.extract,
            "limits": {**asdict(task.limits), "wall_seconds": task.limits.wall},
            "max_timeouts": task.max_timeouts,
            "python": ".".join(map(str, sys.version_info[:2])),
            # Without protection a program can forge its verdict, so such verdicts are stored apart.
            "protected": execution is None or execution.sandbox != "none",
        }

    def _name(self) -> str:
        settings = json.dumps(self.settings(), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return f"verdicts-{self._task.judged_by}-{digest}.jsonl"

    def _open(self, folder: Path) -> RecordFile | None:
        if self._execution is None:
            return RecordFile(self.path, writable=False) if self.path.exists() else None
        self._lock = Lock(folder / "verdicts.lock")
        try:
            if self._execution.anew:
                with suppress(FileNotFoundError):
                    self.path.unlink()
            os.close(open_regular(self.path, os.O_WRONLY | os.O_CREAT))
            return RecordFile(self.path, writable=True)
        except BaseException:
            self._lock.release()
            raise
