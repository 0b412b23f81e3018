"""The judge: many programs at once on all cores, each in a sandbox that nobody else uses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from treegen.common.cores import count_cores
from treegen.errors import InputError, TreegenError
from treegen.tasks.sandbox.canaries import choose_tier
from treegen.tasks.sandbox.limits import Limits
from treegen.tasks.sandbox.process import SandboxProcess
from treegen.tasks.sandbox.programs import (
    Compare,
    Program,
    ProgramResult,
    ProgramStatus,
    SandboxError,
    TestCase,
    TestResult,
    check_program,
)
from treegen.tasks.sandbox.runtime import find_runtime
from treegen.tasks.sandbox.status import decide

# CPU seconds that starting takes. A program that used no more has waited for something other than a
# core.
_STARTING_SECONDS = 0.05
# Programs are judged again alone while the others have waited for that for less than this share of
# the time in which they were judged. A program can look as if it was kept from a core.
_ALONE_SHARE = 0.1


class SandboxPool:
    """Judges programs in a sandbox that has shown, at the start, that it holds.

    Its threads only wait for sandboxes. So judging leaves the interpreter to sampling.

    sandbox: "auto" takes the strongest that works here. "bubblewrap" and "landlock" take these.
    "none" is no protection, and must be asked for by name.
    limits: the limits of each run.
    workers: programs that are judged at once; by default one for each core.
    packages: installed packages, such as "numpy", that programs may import besides the standard
    library.
    report: which sandbox is used. It belongs in every record.

    Raises:
        InputError: there is no such sandbox or package, or `workers` is below 1.
        SandboxError: no sandbox that may be used holds here. The message says what is missing.
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
        self.workers = workers or count_cores()
        self._runtime = find_runtime(tuple(packages))
        self._tier, self.report = choose_tier(sandbox, self._runtime)
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="judge")
        self._quiet = _ExclusiveGate(self.workers)
        self._least_seconds = 0.0  # of CPU time, of programs that were accepted; 0 before the first
        self._local = threading.local()
        self._cells: set[SandboxProcess] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        program: Program,
        tests: Sequence[TestCase],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> Future[ProgramResult]:
        """Judge a program as soon as a worker is free.

        If the judge itself fails, the result's verdict is `judge_error`, and its `accepted` raises.

        Args:
            compare: (output, expected): whether an output is right; see `Compare`.
            stop_at_failure: Leave out the tests after the first that fails.

        Raises:
            InputError: there are no tests, or program and tests do not fit each other.
        """
        check_program(program, tests)
        return self._executor.submit(self._judge, program, tuple(tests), compare, stop_at_failure)

    def run(
        self,
        program: Program,
        tests: Sequence[TestCase],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> ProgramResult:
        """Judge one program and wait for it; see `submit`.

        Raises:
            SandboxError: the judge fails.
            InputError: there are no tests, or program and tests do not fit each other.
        """
        future = self.submit(program, tests, compare, stop_at_failure=stop_at_failure)
        result = future.result()
        if result.verdict is ProgramStatus.JUDGE_ERROR:
            raise SandboxError(
                f"the judge failed: {result.tests[-1].detail}; judge the program again"
            )
        return result

    def close(self) -> None:
        """Drop programs that have not started, wait for the others, and end every sandbox."""
        self._executor.shutdown(cancel_futures=True)
        with self._lock:
            for cell in self._cells:
                cell.close()
            self._cells.clear()

    def _judge(
        self, program: Program, tests: tuple[TestCase, ...], compare: Compare, stop_at_failure: bool
    ) -> ProgramResult:
        results: list[TestResult] = []
        may_retry = True
        for test in tests:
            with self._quiet.run_shared():
                result = self._test(program, test, compare)
            if result.verdict is ProgramStatus.ACCEPTED:
                self._least_seconds = min(self._least_seconds or result.seconds, result.seconds)
            if may_retry and _is_starved(result, self.limits, self._least_seconds):
                # Load may be to blame, so the test runs again, once for each program: alone, or
                # beside others where these have waited long enough. Alone it has to work, because
                # one that works and then sleeps would stop all others.
                may_retry = False
                with self._quiet.alone_if_cheap() as alone:
                    result = self._test(program, test, compare, alone=alone)
                result = dataclasses.replace(result, retried=True)
            results.append(result)
            if result.verdict is ProgramStatus.COMPILE_ERROR:
                results = [result] * len(tests)  # the source is the same for each, so is the error
            failed = result.verdict is not ProgramStatus.ACCEPTED
            if result.verdict is ProgramStatus.JUDGE_ERROR or (stop_at_failure and failed):
                break
            if result.verdict is ProgramStatus.COMPILE_ERROR:
                break
        return ProgramResult(tuple(results), len(tests), self.report.tier)

    def _test(
        self, program: Program, test: TestCase, compare: Compare, *, alone: bool = False
    ) -> TestResult:
        """Run one test. A helper that fails is replaced, and the test is tried once more.

        Args:
            alone: See `SandboxProcess.run`.
        """
        for attempt in range(2):
            try:
                cell = self._cell()
                outcome = cell.run(program, test, alone=alone)
                if outcome.ended["dirty"]:
                    self._discard()  # the next program gets an empty directory
                result = decide(program, test, outcome, self.limits, compare)
            except SandboxError as error:
                self._discard()
                result = TestResult(ProgramStatus.JUDGE_ERROR, detail=str(error))
            except TreegenError:
                raise
            except Exception as error:  # a bug of treegen must not end the judging of all others
                self._discard()
                detail = f"a bug of treegen: {type(error).__name__}: {error}"
                result = TestResult(ProgramStatus.JUDGE_ERROR, detail=detail)
            if result.verdict is not ProgramStatus.JUDGE_ERROR or attempt:
                break
        return result

    def _cell(self) -> SandboxProcess:
        """The sandbox of this thread."""
        cell: SandboxProcess | None = getattr(self._local, "cell", None)
        if cell is None:
            cell = self._local.cell = SandboxProcess(self._tier, self._runtime, self.limits)
            with self._lock:
                self._cells.add(cell)
        return cell

    def _discard(self) -> None:
        cell: SandboxProcess | None = getattr(self._local, "cell", None)
        if cell is not None:
            self._local.cell = None
            with self._lock:
                self._cells.discard(cell)
            cell.close()


def _is_starved(result: TestResult, limits: Limits, least_seconds: float) -> bool:
    """Whether a program ran out of wall time though it had work to do, and CPU time left.

    Args:
        least_seconds: CPU time of the program that took the least. With half of it none has begun.
    """
    if result.verdict is not ProgramStatus.TIMEOUT or result.seconds > limits.cpu_seconds:
        return False
    return result.seconds > _STARTING_SECONDS or result.seconds < least_seconds / 2


class _ExclusiveGate:
    """Lets many run together, or one alone, and knows for how long."""

    def __init__(self, workers: int) -> None:
        self._condition = threading.Condition()
        self._workers = workers
        self._running = 0
        self._waiting = 0
        self._shared_seconds = 0.0  # of all workers together
        self._alone_seconds = 0.0  # in which the others waited, for their turn or for its end

    @contextlib.contextmanager
    def run_shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._running >= 0 and not self._waiting)
            self._running += 1
        started = time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                self._shared_seconds += time.monotonic() - started
                self._running -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone_if_cheap(self) -> Iterator[bool]:
        """Be alone if the others have waited little so far, else beside them. Yields which."""
        with self._condition:
            started = time.monotonic()
            judged = self._shared_seconds / self._workers
            taken = self._waiting or self._running < 0  # another is, or is about to be
            alone = not taken and self._alone_seconds <= _ALONE_SHARE * judged
            self._waiting += alone
        if not alone:
            with self.run_shared():
                yield False
            return
        with self._condition:
            self._condition.wait_for(lambda: self._running == 0)
            self._waiting -= 1
            self._running = -1
        try:
            yield True
        finally:
            with self._condition:
                self._alone_seconds += time.monotonic() - started
                self._running = 0
                self._condition.notify_all()
