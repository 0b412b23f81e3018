"""Runs the programs in the samples of a run in the background, and stores verdicts as they come.

A judge error is not a verdict. It is not stored, and the program runs again next time.
"""

import hashlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from treegen.evals.progress.run_progress import AccuracyCounter, RunProgress, UpdateTimer
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.thinking import get_answer_text
from treegen.runs import Key, RecordFile, RunDir, open_for_append
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.programs.task import (
    NO_OUTCOME,
    ProgramCases,
    ProgramOutcome,
    ProgramTask,
    outcome_of,
    program_hash,
)
from treegen.tasks.sandbox import (
    ProgramResult,
    ProgramStatus,
    SandboxError,
    SandboxPool,
    TestResult,
    list_gaps,
)

_VERSION: Final = 3
_LOCK: Final = "verdicts.lock"


class VerdictFile:
    """The stored verdicts of one combination of scoring settings, in a file of the run directory.

        verdicts-strict-1f0c8a2d.jsonl    {"problem_id": ..., "sample_index": ..., "verdict": ...}

    So sampling, scoring, and scoring with other settings can each stop and resume at any time.

    Attributes:
        path: The file.
    """

    def __init__(self, task: ProgramTask, folder: Path, execution: ExecutionOptions | None) -> None:
        """Open the verdicts stored in a run directory, for writing if programs may run.

        Args:
            task: The task of the run.
            folder: The run directory.
            execution: How programs may run; None if they may not.
        """
        self._task, self._execution = task, execution
        settings = json.dumps(self.settings(), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        self.path = folder / f"verdicts-{task.judged_by}-{digest}.jsonl"
        self._stack = ExitStack()
        self._file: RecordFile | None = None
        if execution is not None:
            opened = open_for_append(self.path, _LOCK, overwrite=execution.rescore)
            self._file = self._stack.enter_context(opened)
        elif self.path.exists():
            stored = RecordFile(self.path, writable=False)
            self._file = self._stack.enter_context(closing(stored))

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
        self._stack.close()

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


# Maximum programs in the queue for each worker; several, so that no core waits for the next poll.
_QUEUED_PER_WORKER: Final = 4
# Maximum tests of a program to submit at once. The end of a run waits for them.
_MAX_TESTS_PER_SUBMIT: Final = 8
_MAX_LISTED_ERRORS: Final = 5
# Packages that programs may import in addition to the standard library.
PACKAGES: Final = ("numpy",)


@dataclass(slots=True)
class _PendingProgram:
    """A program to run, once for all samples with the same program."""

    problem_id: str
    program: str  # short hash of the program
    source: str
    keys: list[Key]  # the samples with this program
    cases: ProgramCases | None = None  # the tests of the problem, once they are read
    results: list[TestResult] = field(default_factory=list)  # the results so far
    future: Future[ProgramResult] | None = None  # the tests that are running; None if none are


class SandboxScoring(AccuracyCounter):
    """The verdicts on one run's samples: stored ones and those still to come.

    Only one thread may use it; the sandbox's own threads only run programs. Equal programs for one
    problem run once.
    """

    def __init__(self, task: ProgramTask, run: RunDir, execution: ExecutionOptions | None) -> None:
        """Read the stored verdicts. The sandbox starts when it is needed.

        Args:
            task: The task of the run.
            run: The run directory.
            execution: How programs may run; None if they may not.
        """
        super().__init__()
        self._task = task
        self._execution = execution
        self._judge: SandboxPool | None = None
        self._outcomes: dict[Key, ProgramOutcome] = {}
        self._outcome_of: dict[tuple[str, str], ProgramOutcome] = {}
        self._waiting: deque[_PendingProgram] = deque()
        self._running: dict[tuple[str, str], _PendingProgram] = {}
        self._queued: dict[tuple[str, str], _PendingProgram] = {}
        self._added: set[Key] = set()
        self._errors: dict[Key, str] = {}
        # Remember failures, because a failing reference solution may take its whole time limit.
        self._no_cases: dict[str, str] = {}
        self._file = VerdictFile(task, run.path, execution)
        for key, outcome in self._file.read_stored():
            if outcome.program is not None:
                outcome = self._outcome_of.setdefault((key[0], outcome.program), outcome)
            self._outcomes[key] = outcome

    def prepare(self) -> list[str]:
        """Start the sandbox, which tests itself. Return lines for the user.

        Raises:
            SandboxError: No allowed sandbox holds on this machine.
        """
        if self._execution is None or self._judge is not None:
            return []
        self._judge = SandboxPool(
            self._execution.sandbox,
            limits=self._task.limits,
            workers=self._execution.num_workers,
            packages=PACKAGES,
        )
        return self._judge.report.lines()

    def add(self, record: Mapping[str, Any]) -> None:
        """Queue a stored sample for scoring; return at once."""
        key = (record["problem_id"], record["sample_index"])
        if key in self._added:
            return
        self._added.add(key)
        if key in self._outcomes:
            self._count(key, self._outcomes[key])
            return
        if self._execution is None:
            return
        source = self._task.program(key[0], get_answer_text(record))
        if source is None:
            self._settle(key, NO_OUTCOME)
            return
        name = (key[0], program_hash(source))
        if name in self._outcome_of:
            self._settle(key, self._outcome_of[name])
        elif name in self._queued:
            self._queued[name].keys.append(key)
        else:
            pending = _PendingProgram(key[0], name[1], source, [key])
            self._queued[name] = pending
            self._waiting.append(pending)

    def poll(self) -> None:
        """Collect finished verdicts, and submit more programs."""
        for name, pending in list(self._running.items()):
            if pending.future is not None and pending.future.done():
                self._take_result(pending, pending.future.result())
                if pending.future is None:
                    del self._running[name], self._queued[name]
        if not self._waiting:
            return
        self.prepare()
        assert self._judge is not None
        while self._waiting and len(self._running) < _QUEUED_PER_WORKER * self._judge.workers:
            pending = self._waiting.popleft()
            self._submit(pending)
            name = (pending.problem_id, pending.program)
            if pending.future is None:
                del self._queued[name]
            else:
                self._running[name] = pending

    def finish(self, stop: Callable[[], object] = lambda: None) -> Iterator[RunProgress]:
        """Wait for the verdicts on all added samples, and yield the progress.

        Args:
            stop: Called repeatedly; waiting ends when it returns true.
        """
        start, started = time.monotonic(), self.num_judged
        update_timer, interval = UpdateTimer(), None
        self.poll()
        while self._queued and not stop():
            futures = [f.future for f in self._running.values() if f.future is not None]
            wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
            self.poll()
            if update_timer(now=not self._queued):
                interval = self.estimate()
            yield RunProgress(
                done=self.num_judged,
                planned=len(self._added),
                rows=len(self._running),
                pages=0,
                num_pages=0,
                tokens=0,
                seconds=time.monotonic() - start,
                accuracy=self.accuracy,
                started=started,
                estimate=interval,
                compute_estimate=self.estimate,
            )
        self._file.sync()

    def verdicts(self, record: Mapping[str, Any]) -> dict[str, ProgramVerdict] | None:
        """Return the verdict on a sample by filter; None if there is none yet."""
        outcome = self._outcomes.get((record["problem_id"], record["sample_index"]))
        return None if outcome is None else self._task.score_outcome(record["problem_id"], outcome)

    @property
    def missing(self) -> int:
        """Number of added samples without a verdict, including those with judge errors."""
        return len(self._added) - self.num_judged

    def summary(self) -> dict[str, Any]:
        """Return how the samples were scored, as JSON values."""
        tiers = Counter(outcome.sandbox for outcome in self._outcomes.values() if outcome.sandbox)
        # Count stored verdicts of all commands, because this one may have run no program.
        unprotected = {
            name: {"samples": tiers[name], "gaps": list(list_gaps(name))}
            for name in sorted(tiers)
            if list_gaps(name)
        }
        # Sort the errors, so that their order does not depend on which sample finished first.
        errors = sorted(self._errors.items())[:_MAX_LISTED_ERRORS]
        return {
            **self._file.settings(),
            "verdicts": self._file.path.name,
            "sandbox": sorted(tiers),
            "unprotected": unprotected,
            "judged": self.num_judged,
            "judge_errors": len(self._errors),
            "errors": [{"problem_id": k[0], "sample_index": k[1], "detail": d} for k, d in errors],
        }

    def close(self) -> None:
        """End every program. Samples without a stored verdict are scored next time."""
        try:
            if self._judge is not None:
                self._judge.close()
                self._judge = None
        finally:
            self._file.close()

    def _submit(self, pending: _PendingProgram) -> None:
        """Submit the program's next tests; its future stays None if the tests cannot be read."""
        assert self._judge is not None
        if pending.cases is None and pending.problem_id not in self._no_cases:
            try:
                pending.cases = self._task.cases(pending.problem_id, self._judge)
            except SandboxError as error:
                self._no_cases[pending.problem_id] = str(error)
        if pending.cases is None:
            self._errors |= dict.fromkeys(pending.keys, self._no_cases[pending.problem_id])
            return
        start = len(pending.results)
        pending.future = self._judge.submit(
            pending.cases.program(pending.source),
            pending.cases.tests[start : start + _MAX_TESTS_PER_SUBMIT],
            pending.cases.compare,
            stop_at_failure=True,
        )

    def _take_result(self, pending: _PendingProgram, result: ProgramResult) -> None:
        """Add the new results. Then submit the remaining tests, or store the verdict."""
        pending.future = None
        pending.results += result.tests
        last = pending.results[-1]
        assert pending.cases is not None
        num_tests = len(pending.cases.tests)
        if last.verdict is ProgramStatus.JUDGE_ERROR:
            for key in pending.keys:
                self._errors[key] = last.detail
            return
        verdicts = [test.verdict for test in pending.results]
        is_decided = (
            last.verdict is ProgramStatus.COMPILE_ERROR
            or (not self._task.all_tests and last.verdict is not ProgramStatus.ACCEPTED)
            or verdicts.count(ProgramStatus.TIMEOUT) >= self._task.max_timeouts
        )
        if len(verdicts) < num_tests and not is_decided:
            self._submit(pending)
            return
        outcome = outcome_of(pending.program, pending.results, num_tests, result.sandbox)
        self._outcome_of[pending.problem_id, pending.program] = outcome
        for key in pending.keys:
            self._settle(key, outcome)

    def _settle(self, key: Key, outcome: ProgramOutcome) -> None:
        """Store a verdict."""
        self._file.append(key, outcome)
        self._outcomes[key] = outcome
        self._count(key, outcome)

    def _count(self, key: Key, outcome: ProgramOutcome) -> None:
        self.count(key[0], outcome.verdict == ProgramStatus.ACCEPTED)
