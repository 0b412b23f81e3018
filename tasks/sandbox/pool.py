"""Runs many programs at once; each thread has a sandbox, which runs one program at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from treegen.common.cores import count_cores
from treegen.common.lifetimes import Closeable
from treegen.errors import InputError, TreegenError
from treegen.tasks.sandbox import value_json
from treegen.tasks.sandbox.canaries import choose_tier
from treegen.tasks.sandbox.process import ProcessOutcome, SandboxProcess
from treegen.tasks.sandbox.programs import (
    Compare,
    Limits,
    Program,
    ProgramResult,
    ProgramStatus,
    SandboxError,
    TestCase,
    TestResult,
    check_program,
)
from treegen.tasks.sandbox.runtime import EXTERNAL_SIGNALS, find_runtime, signal_name

_DETAIL_CHARS = 300
_STAGES = 3


def decide(
    program: Program, test: TestCase, outcome: ProcessOutcome, limits: Limits, compare: Compare
) -> TestResult:
    """Return the verdict of one run; compare its output if it has one.

    This runs in the trusted process only.

    Args:
        program: The program.
        test: The test case.
        outcome: What was observed of the run.
        limits: Limits of the run.
        compare: Returns whether an output is right.

    Raises:
        SandboxError: The comparer failed.
    """
    exit_info = outcome.exit_info
    report = outcome.report.decode("utf-8", "replace").split("\n")
    report += [""] * (_STAGES - len(report))  # a missing line counts as an empty one
    verdict, detail = _find_failure(outcome, report, limits)
    if verdict is None:
        verdict, detail = _judge_answer(program, test, outcome, report, compare)
    return TestResult(
        verdict=verdict,
        seconds=exit_info["cpu"],
        wall_seconds=exit_info["wall"],
        memory=exit_info["memory"],
        detail=detail[:_DETAIL_CHARS],
    )


def _find_failure(
    outcome: ProcessOutcome, report: list[str], limits: Limits
) -> tuple[ProgramStatus | None, str]:
    """Return why the run gives no answer, or None. Limits come first: the helper measured them."""
    exit_info = outcome.exit_info
    status, killed = exit_info["status"], exit_info["killed"]
    if outcome.overflow:
        return ProgramStatus.OUTPUT_LIMIT, f"more than {outcome.cap} bytes"
    if killed == "files":
        return ProgramStatus.OUTPUT_LIMIT, "too many files or bytes in the scratch directory"
    if killed == "cpu" or exit_info["cpu"] > limits.cpu_seconds:
        return ProgramStatus.TIMEOUT, f"more than {limits.cpu_seconds:g} s of CPU time"
    if killed == "wall":
        return ProgramStatus.TIMEOUT, f"more than {limits.wall:g} s of wall time"
    if report[0] != "ready":
        reason = report[0] or f"the child ended early with status {status}"
        return ProgramStatus.JUDGE_ERROR, reason
    if report[1] != "compiled" and -status in EXTERNAL_SIGNALS:
        # No code of the program runs while it is compiled, so the program did not send the signal.
        return ProgramStatus.JUDGE_ERROR, f"the compiler was ended by {_describe_status(status)}"
    if report[1] != "compiled":
        reason = report[1].removeprefix("compile_error ")
        reason = reason or f"the compiler died: {_describe_status(status)}"
        return ProgramStatus.COMPILE_ERROR, reason
    if status == 0:
        return None, ""
    lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
    detail = f"{_describe_status(status)}: {lines[-1]}" if lines else _describe_status(status)
    # A program killed near its memory limit had a failed allocation that Python could not report.
    is_full = status < 0 and exit_info["memory"] > 0.9 * limits.memory
    if "memory" in report[2:] or is_full:
        return ProgramStatus.MEMORY_LIMIT, detail
    return ProgramStatus.RUNTIME_ERROR, detail


def _judge_answer(
    program: Program, test: TestCase, outcome: ProcessOutcome, report: list[str], compare: Compare
) -> tuple[ProgramStatus, str]:
    """Return the verdict on the output of a run that ended normally, and a detail."""
    output: Any = outcome.stdout.decode("utf-8", "replace")
    if program.fn_name is not None:
        stage, _, text = report[2].partition(" ")
        if stage == "unreadable":
            return ProgramStatus.WRONG_ANSWER, f"returned a value that cannot be compared: {text}"
        if stage != "result":
            return ProgramStatus.RUNTIME_ERROR, f"ended before {program.fn_name} returned"
        try:
            output = value_json.loads(text, allow_numpy=program.may_return_numpy)
        except ValueError as error:
            return ProgramStatus.WRONG_ANSWER, f"returned a value that cannot be read: {error}"
    try:
        accepted = bool(compare(output, test.expected))
    except Exception as error:
        raise SandboxError(
            f"the comparer failed: {type(error).__name__}: {error}; fix or replace the comparer"
        ) from error
    return (ProgramStatus.ACCEPTED, "") if accepted else (ProgramStatus.WRONG_ANSWER, "")


def _describe_status(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal_name(-status)


# CPU seconds that the start of a program takes. A program that used no more was not waiting for a
# core.
_STARTUP_CPU_SECONDS = 0.05
# A program runs again alone only while all programs have waited for such runs for less than this
# share of their running time, because a program can pretend to be starved.
_MAX_ALONE_SHARE = 0.1


class SandboxPool(Closeable):
    """Runs programs in a sandbox that was tested at the start.

    The threads of the pool only wait for sandboxes, so sampling can use the interpreter.

    Args:
        sandbox: "bubblewrap", "landlock", "none" for no protection, or "auto" (the default) for the
            stronger of the first two that works here.
        limits: The limits of each run.
        workers: Maximum programs that run at once; by default one for each core.
        packages: Installed packages, such as "numpy", that programs may import in addition to the
            standard library.

    Raises:
        InputError: There is no such sandbox or package, or `workers` is below 1.
        SandboxError: No allowed sandbox holds here. The message says what is missing.

    Attributes:
        limits: The limits of each run.
        workers: Maximum programs that run at once.
        report: The sandbox in use and its gaps. Every record must include it.
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
        self._gate = _ExclusiveGate(self.workers)
        self._min_cpu_seconds = 0.0  # of an accepted program; 0 before the first
        self._local = threading.local()
        self._processes: set[SandboxProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        program: Program,
        tests: Sequence[TestCase],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> Future[ProgramResult]:
        """Run a program on its tests as soon as a worker is free.

        If the sandbox itself fails, the result's verdict is `judge_error`, and its `accepted`
        raises. If the pool is closed first, `Future.result` raises CancelledError.

        Args:
            program: The program.
            tests: Its test cases, at least one.
            compare: Returns whether an output is right, given (output, expected); see `Compare`.
            stop_at_failure: Whether to skip the tests after the first failure.

        Raises:
            InputError: There are no tests, they do not fit the program, or the pool is closed.
        """
        check_program(program, tests)
        if self._closed:
            raise InputError("this SandboxPool is closed; create a new SandboxPool")
        return self._executor.submit(self._judge, program, tuple(tests), compare, stop_at_failure)

    def run(
        self,
        program: Program,
        tests: Sequence[TestCase],
        compare: Compare,
        *,
        stop_at_failure: bool = False,
    ) -> ProgramResult:
        """Run one program on its tests and wait for the result.

        Args:
            program: The program.
            tests: Its test cases, at least one.
            compare: Returns whether an output is right, given (output, expected); see `Compare`.
            stop_at_failure: Whether to skip the tests after the first failure.

        Raises:
            SandboxError: The sandbox fails, or another thread closes the pool.
            InputError: There are no tests, or they do not fit the program.
        """
        future = self.submit(program, tests, compare, stop_at_failure=stop_at_failure)
        try:
            result = future.result()
        except CancelledError:
            raise SandboxError(
                "this SandboxPool was closed while it ran the program; judge the program again"
            ) from None
        if result.verdict is ProgramStatus.JUDGE_ERROR:
            raise SandboxError(
                f"the judge failed: {result.tests[-1].detail}; judge the program again"
            )
        return result

    def close(self) -> None:
        """Kill running programs, drop all others, and end all sandboxes.

        Programs that have not ended get no result. Results of those that have ended are kept.
        """
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._executor.shutdown(cancel_futures=True)
        with self._lock:
            for process in self._processes:
                process.close()
            self._processes.clear()

    def _judge(
        self, program: Program, tests: tuple[TestCase, ...], compare: Compare, stop_at_failure: bool
    ) -> ProgramResult:
        results: list[TestResult] = []
        may_retry = True
        for test in tests:
            with self._gate.run_shared():
                result = self._run_test(program, test, compare)
            if result.verdict is ProgramStatus.ACCEPTED:
                self._min_cpu_seconds = min(self._min_cpu_seconds or result.seconds, result.seconds)
            if may_retry and _is_starved(result, self.limits, self._min_cpu_seconds):
                # High load may be the cause, so one test of each program may run again: alone, or
                # next to others if these have already waited long. A program that runs alone must
                # use the CPU, because one that sleeps would stop all others.
                may_retry = False
                with self._gate.alone_if_cheap() as alone:
                    result = self._run_test(program, test, compare, alone=alone)
                result = dataclasses.replace(result, retried=True)
            results.append(result)
            if result.verdict is ProgramStatus.COMPILE_ERROR:
                results = [result] * len(tests)  # all tests share the source and so the error
            failed = result.verdict is not ProgramStatus.ACCEPTED
            if result.verdict is ProgramStatus.JUDGE_ERROR or (stop_at_failure and failed):
                break
            if result.verdict is ProgramStatus.COMPILE_ERROR:
                break
        return ProgramResult(tuple(results), len(tests), self.report.tier)

    def _run_test(
        self, program: Program, test: TestCase, compare: Compare, *, alone: bool = False
    ) -> TestResult:
        """Run one test. If the helper fails, replace it and run the test once more.

        Raises CancelledError if the pool is closed meanwhile.

        Args:
            program: The program.
            test: The test case.
            compare: Returns whether an output is right.
            alone: See `SandboxProcess.run`.
        """
        for attempt in range(2):
            try:
                process = self._get_process()
                outcome = process.run(program, test, alone=alone)
                if outcome.exit_info["dirty"]:
                    self._discard_process()  # the next program gets an empty directory
                result = decide(program, test, outcome, self.limits, compare)
            except SandboxError as error:
                self._discard_process()
                result = TestResult(ProgramStatus.JUDGE_ERROR, detail=str(error))
            except TreegenError:
                raise
            except Exception as error:  # a bug of treegen must not stop all other programs
                self._discard_process()
                detail = f"a bug of treegen: {type(error).__name__}: {error}"
                result = TestResult(ProgramStatus.JUDGE_ERROR, detail=detail)
            if self._closed:  # the program may have been killed
                raise CancelledError
            if result.verdict is not ProgramStatus.JUDGE_ERROR or attempt:
                break
        return result

    def _get_process(self) -> SandboxProcess:
        """Return the sandbox of this thread, and start it if there is none."""
        process: SandboxProcess | None = getattr(self._local, "process", None)
        if process is None:
            process = self._local.process = SandboxProcess(self._tier, self._runtime, self.limits)
            with self._lock:
                self._processes.add(process)
                if self._closed:  # before this process was in the set
                    process.kill()
        return process

    def _discard_process(self) -> None:
        process: SandboxProcess | None = getattr(self._local, "process", None)
        if process is not None:
            self._local.process = None
            with self._lock:
                self._processes.discard(process)
            process.close()


def _is_starved(result: TestResult, limits: Limits, min_cpu_seconds: float) -> bool:
    """Return whether a program hit the wall time though it had work to do and CPU time left.

    Args:
        result: Result of the program's test.
        limits: Limits of the program.
        min_cpu_seconds: Least CPU time of an accepted program. A program that used less than half
            of it cannot have started its work.
    """
    if result.verdict is not ProgramStatus.TIMEOUT or result.seconds > limits.cpu_seconds:
        return False
    return result.seconds > _STARTUP_CPU_SECONDS or result.seconds < min_cpu_seconds / 2


class _ExclusiveGate:
    """A lock that many threads hold together or one alone. It measures how long they hold it."""

    def __init__(self, workers: int) -> None:
        self._condition = threading.Condition()
        self._workers = workers
        self._running = 0
        self._waiting = 0
        self._shared_seconds = 0.0  # sum over all workers
        # Time in which the others waited for a run alone to begin or to end.
        self._alone_seconds = 0.0

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
        """Hold the lock alone if others have waited little so far; yield whether it is alone."""
        with self._condition:
            started = time.monotonic()
            judged = self._shared_seconds / self._workers
            is_reserved = self._waiting or self._running < 0  # another program is or will be alone
            alone = not is_reserved and self._alone_seconds <= _MAX_ALONE_SHARE * judged
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
