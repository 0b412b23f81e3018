"""The judge: many programs at once on all cores, each in a sandbox that nobody else uses."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from treegen.errors import InputError, TreegenError
from treegen.tasks.judge.canaries import choose_tier
from treegen.tasks.judge.cell import SandboxCell
from treegen.tasks.judge.decide import decide
from treegen.tasks.judge.limits import Limits
from treegen.tasks.judge.runtime import find_runtime
from treegen.tasks.judge.verdicts import (
    Compare,
    JudgeError,
    JudgeVerdict,
    Program,
    ProgramResult,
    Test,
    TestResult,
    check_program,
)

# CPU time that starting takes. Who used no more has waited, for something other than a core.
_STARTING_SECONDS = 0.05


class Judge:
    """Judges programs in a sandbox that has shown, at the start, that it holds.

    `sandbox` is "auto" (the strongest that works here), "bubblewrap", "landlock", or "none": no
    protection, to be asked for by name. `report` says which it is and belongs in every record.
    `packages` are installed packages, such as "numpy", that programs may import besides the
    standard library.

    Threads only wait for sandboxes, so judging leaves the interpreter to whoever samples.

    Raises:
        JudgeError: no sandbox works here; the message says what is missing.
        InputError: an argument cannot be used.
    """

    def __init__(
        self,
        sandbox: str = "auto",
        *,
        limits: Limits | None = None,
        workers: int | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, got {workers}")
        self.limits = limits or Limits()
        self.workers = workers or len(os.sched_getaffinity(0))
        self._runtime = find_runtime(tuple(packages))
        self._tier, self.report = choose_tier(sandbox, self._runtime)
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="judge")
        self._quiet = _Quiet()
        self._local = threading.local()
        self._cells: set[SandboxCell] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        program: Program,
        tests: Sequence[Test],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> Future[ProgramResult]:
        """Judge a program as soon as a core is free; the future never holds a verdict by accident.

        When the judge itself fails, the result's verdict is `judge_error`, and its `accepted`
        raises.

        Raises:
            InputError: the program and its tests cannot be judged.
        """
        check_program(program, tests)
        return self._executor.submit(self._judge, program, tuple(tests), compare, stop_at_failure)

    def run(
        self,
        program: Program,
        tests: Sequence[Test],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> ProgramResult:
        """Judge one program and wait for it.

        Raises:
            JudgeError: the judge fails.
        """
        future = self.submit(program, tests, compare, stop_at_failure=stop_at_failure)
        result = future.result()
        if result.verdict is JudgeVerdict.JUDGE_ERROR:
            raise JudgeError(f"the judge failed: {result.tests[-1].detail}")
        return result

    def close(self) -> None:
        """Drop what has not started, wait for what has, and end every sandbox."""
        self._executor.shutdown(cancel_futures=True)
        with self._lock:
            for cell in self._cells:
                cell.close()
            self._cells.clear()

    def _judge(
        self, program: Program, tests: tuple[Test, ...], compare: Compare, stop_at_failure: bool
    ) -> ProgramResult:
        results: list[TestResult] = []
        may_retry = True
        for test in tests:
            with self._quiet.shared():
                result = self._test(program, test, compare)
            if may_retry and _starved(result, self.limits):
                # Load may be to blame; alone on the machine it is not. Once for each program: one
                # that works and then sleeps would otherwise stop all others again at every test.
                may_retry = False
                with self._quiet.alone():
                    result = self._test(program, test, compare)
                result = dataclasses.replace(result, retried=True)
            results.append(result)
            if result.verdict is JudgeVerdict.COMPILE_ERROR:
                results = [result] * len(tests)  # the same source, the same error
            failed = result.verdict is not JudgeVerdict.ACCEPTED
            if result.verdict is JudgeVerdict.JUDGE_ERROR or (stop_at_failure and failed):
                break
            if result.verdict is JudgeVerdict.COMPILE_ERROR:
                break
        return ProgramResult(tuple(results), len(tests), self.report.tier)

    def _test(self, program: Program, test: Test, compare: Compare) -> TestResult:
        """Run one test; a helper that fails is replaced, and the test is tried once more."""
        for attempt in range(2):
            try:
                cell = self._cell()
                outcome = cell.run(program, test)
                if outcome.ended["dirty"]:
                    self._discard()  # the next program gets an empty directory
                result = decide(program, test, outcome, self.limits, compare)
            except JudgeError as error:
                self._discard()
                result = TestResult(JudgeVerdict.JUDGE_ERROR, detail=str(error))
            except TreegenError:
                raise
            except Exception as error:  # a fault of ours must not end the judging of all others
                self._discard()
                detail = f"a bug of treegen: {type(error).__name__}: {error}"
                result = TestResult(JudgeVerdict.JUDGE_ERROR, detail=detail)
            if result.verdict is not JudgeVerdict.JUDGE_ERROR or attempt:
                break
        return result

    def _cell(self) -> SandboxCell:
        """The sandbox of this thread."""
        cell: SandboxCell | None = getattr(self._local, "cell", None)
        if cell is None:
            cell = self._local.cell = SandboxCell(self._tier, self._runtime, self.limits)
            with self._lock:
                self._cells.add(cell)
        return cell

    def _discard(self) -> None:
        cell: SandboxCell | None = getattr(self._local, "cell", None)
        if cell is not None:
            self._local.cell = None
            with self._lock:
                self._cells.discard(cell)
            cell.close()


def _starved(result: TestResult, limits: Limits) -> bool:
    """Whether a program worked, but was not given the time by when it was stopped."""
    by_wall_only = result.verdict is JudgeVerdict.TIMEOUT and result.seconds <= limits.cpu_seconds
    return by_wall_only and result.seconds > _STARTING_SECONDS


class _Quiet:
    """Lets many run together, or one alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._waiting = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._running >= 0 and not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: self._running == 0)
            self._waiting -= 1
            self._running = -1
        try:
            yield
        finally:
            with self._condition:
                self._running = 0
                self._condition.notify_all()
