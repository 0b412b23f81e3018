"""The judge from outside: verdicts, limits, failures of its own, and what is left after it."""

from __future__ import annotations

import errno
import functools
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_cases import ADD, LIMITS, MIB, USABLE, compare, left_since, traces, verdict_of

from treegen.errors import InputError
from treegen.tasks.sandbox import (
    Limits,
    Program,
    ProgramResult,
    ProgramStatus,
    SandboxError,
    SandboxPool,
    TestCase,
    TestResult,
    canaries,
    runtime,
)
from treegen.tasks.sandbox.isolation import TIERS, SandboxTier
from treegen.tasks.sandbox.pool import _ExclusiveGate, _is_starved
from treegen.tasks.sandbox.process import SandboxProcess, _make_sealed_file
from treegen.tasks.sandbox.programs import HelperKilledError
from treegen.tasks.sandbox.runtime import find_runtime

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
    pytest.mark.usefixtures("only_judge"),
]


@pytest.fixture(scope="module", params=USABLE)
def judge(only_judge: None, request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with SandboxPool(request.param, limits=LIMITS, workers=2) as judge:
        yield judge


def test_each_test_has_its_own_verdict(judge: SandboxPool) -> None:
    tests = [
        TestCase("1 2", expected="3"),
        TestCase("1 2", expected="4"),
        TestCase("x", expected="3"),
    ]
    result = judge.run(ADD, tests, compare)
    want = [ProgramStatus.ACCEPTED, ProgramStatus.WRONG_ANSWER, ProgramStatus.RUNTIME_ERROR]
    assert [test.verdict for test in result.tests] == want
    assert result.verdict is ProgramStatus.WRONG_ANSWER
    assert not result.accepted
    assert "ValueError" in result.tests[2].detail
    assert result.sandbox == judge.report.tier


def test_stopping_at_the_first_failure_is_no_pass(judge: SandboxPool) -> None:
    tests = [
        TestCase("1 2", expected="3"),
        TestCase("1 2", expected="4"),
        TestCase("1 2", expected="3"),
    ]
    result = judge.run(ADD, tests, compare, stop_at_failure=True)
    assert len(result.tests) == 2
    assert result.num_tests == 3
    assert not result.accepted
    assert not ProgramResult(result.tests[:1], 3, "landlock").accepted


@pytest.mark.parametrize(
    "source",
    ["def f(:", "print(1)\0", "print('\ud800')", "(" * 5000, "-" * 200_000 + "1", "\tx\n  y"],
    ids=["syntax", "nul", "surrogate", "nested", "deep", "tabs"],
)
def test_compile_errors(judge: SandboxPool, source: str) -> None:
    tests = [TestCase(expected="")] * 2
    result = judge.run(Program(source), tests, compare)
    assert [test.verdict for test in result.tests] == [ProgramStatus.COMPILE_ERROR] * 2


def test_a_coding_cookie_means_nothing(judge: SandboxPool) -> None:
    source = "# -*- coding: utf-7 -*-\n# +AAo-print('hidden')\nprint('shown')"
    assert verdict_of(judge, source, "shown") is ProgramStatus.ACCEPTED


def test_names_and_text_beyond_ascii(judge: SandboxPool) -> None:
    source = "\u03b1, \u00df = input().split()\nprint(\u03b1 + \u00df + '\U0001f600')"
    text = "\u00e9\u4e2d\U0001f600"
    assert verdict_of(judge, source, text, "\u00e9 \u4e2d") is ProgramStatus.ACCEPTED


def test_bytes_that_are_no_text_are_a_wrong_answer(judge: SandboxPool) -> None:
    source = "import sys\nsys.stdout.buffer.write(bytes(range(256)))"
    assert verdict_of(judge, source, "x") is ProgramStatus.WRONG_ANSWER


def test_a_prelude_runs_first(judge: SandboxPool) -> None:
    source = (
        "from __future__ import annotations\ndef f(x: List[int]) -> int:\n    return sqrt(x[0])"
    )
    program = Program(source, fn_name="f", prelude="from math import *\nfrom typing import *")
    assert judge.run(program, [TestCase(args=[[9]], expected=3.0)], compare).accepted


def test_a_call_does_not_run_the_main_guard(judge: SandboxPool) -> None:
    source = "def f(x): return x\nif __name__ == '__main__': raise SystemExit(1)"
    program = Program(source, fn_name="f")
    assert judge.run(program, [TestCase(args=["a"], expected="a")], compare).accepted


def test_the_order_of_a_set_is_the_same_in_every_run() -> None:
    orders: set[str] = set()

    def keep(output: str, expected: object) -> bool:
        orders.add(output)
        return True

    for sandbox in [*USABLE, "none"]:
        with SandboxPool(sandbox, workers=1) as judge:
            judge.run(Program("print({'a', 'b', 'c', 'd', 'e'})"), [TestCase()], keep)
    assert len(orders) == 1


def test_only_a_program_that_worked_is_judged_again_alone() -> None:
    sleeper = "import time\ntime.sleep(100)"
    worker = f"import time\nwhile time.process_time() < 0.2: pass\n{sleeper}"
    limits = Limits(cpu_seconds=1.0, wall_seconds=1.0)
    with SandboxPool(USABLE[0], limits=limits, workers=2) as judge:
        futures = [judge.submit(Program(s), [TestCase()] * 2, compare) for s in (sleeper, worker)]
        others = [judge.submit(ADD, [TestCase("1 2", expected="3")], compare) for _ in range(20)]
        assert all(other.result().accepted for other in others)
        results = [future.result().tests for future in futures]
    late = [ProgramStatus.TIMEOUT] * 2
    assert [[test.verdict for test in tests] for tests in results] == [late, late]
    assert [[test.retried for test in tests] for tests in results] == [
        [False, False],
        [True, False],
    ]


@pytest.mark.parametrize(
    ("seconds", "starved"),
    [(0.001, True), (0.008, False), (0.02, False), (0.2, True), (1.5, False)],
)
def test_starved_programs_differ_from_waiting_programs(seconds: float, starved: bool) -> None:
    late = TestResult(ProgramStatus.TIMEOUT, seconds=seconds)
    assert _is_starved(late, Limits(cpu_seconds=1.0), min_cpu_seconds=0.01) == starved
    assert not _is_starved(replace(late, verdict=ProgramStatus.ACCEPTED), Limits(), 0.01)


def test_time_is_cpu_time(judge: SandboxPool) -> None:
    waits = "import time\ntime.sleep(1.0)\nprint('done')"  # longer than the CPU limit
    (result,) = judge.run(Program(waits), [TestCase(expected="done")], compare).tests
    assert result.verdict is ProgramStatus.ACCEPTED
    assert result.seconds < 0.3
    assert result.wall_seconds > 0.9


def test_a_comparer_that_fails_is_no_verdict(judge: SandboxPool) -> None:
    def broken(output: str, expected: object) -> bool:
        raise ZeroDivisionError

    future = judge.submit(ADD, [TestCase("1 2", expected="3")], broken)
    assert future.result().verdict is ProgramStatus.JUDGE_ERROR
    with pytest.raises(SandboxError, match="comparer"):
        _ = future.result().accepted
    with pytest.raises(SandboxError, match="comparer"):
        judge.run(ADD, [TestCase("1 2", expected="3")], broken)


def test_a_helper_that_died_is_replaced(judge: SandboxPool) -> None:
    assert judge.run(ADD, [TestCase("1 2", expected="3")], compare).accepted
    for cell in list(judge._processes):
        cell._process.kill()
        cell._process.wait()
    assert judge.run(ADD, [TestCase("1 2", expected="3")], compare).accepted


def test_a_fault_of_ours_is_no_verdict_and_ends_nothing(
    judge: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> TestResult:
        raise IndexError("none there")

    monkeypatch.setattr("treegen.tasks.sandbox.pool.decide", broken)
    result = judge.submit(ADD, [TestCase("1 2", expected="3")], compare).result()
    assert result.verdict is ProgramStatus.JUDGE_ERROR
    assert "IndexError: none there" in result.tests[0].detail


def test_a_time_limit_may_be_longer_than_the_system_can_wait() -> None:
    with SandboxPool("none", limits=replace(LIMITS, cpu_seconds=1e15, wall_seconds=1e18)) as judge:
        assert judge.run(ADD, [TestCase("1 2", expected="3")], compare).accepted


def test_too_many_open_files_leave_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with SandboxProcess(TIERS["none"], find_runtime(), LIMITS) as process:
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(os, "pipe", fail)
        with pytest.raises(SandboxError, match="Too many open files"):
            process.run(ADD, TestCase("1 2"))
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="sandbox must be"):
        SandboxPool("docker")
    with pytest.raises(InputError, match="workers"):
        SandboxPool(workers=0)
    with pytest.raises(InputError, match="not installed"):
        SandboxPool(packages=["no_such_package"])
    with pytest.raises(InputError, match=r"whole packages, got 'no_such\.module'; pass 'no_such'"):
        SandboxPool(packages=["no_such.module"])
    with pytest.raises(InputError, match="cpu_seconds"):
        Limits(cpu_seconds=0)
    with pytest.raises(InputError, match="wall_seconds"):
        Limits(cpu_seconds=2, wall_seconds=1)
    with pytest.raises(InputError, match="memory"):
        Limits(memory=MIB)
    for limit in ({"cpu_seconds": math.nan}, {"wall_seconds": math.inf}, {"memory": 1 << 63}):
        with pytest.raises(InputError, match="below 2"):
            Limits(**limit)


def test_nothing_passes_without_tests() -> None:
    with SandboxPool("none", workers=1) as judge:
        with pytest.raises(InputError, match="without tests"):
            judge.submit(ADD, [], compare)
        with pytest.raises(InputError, match="fn_name"):
            judge.submit(ADD, [TestCase(args=[1])], compare)
        with pytest.raises(InputError, match="may_return"):
            judge.submit(Program("", fn_name="f", may_return=True), [TestCase()], compare)
        with pytest.raises(InputError, match="plain data"):
            judge.run(Program("", fn_name="f"), [TestCase(args=[object()])], compare)
    with pytest.raises(InputError, match="this SandboxPool is closed"):
        judge.submit(ADD, [TestCase("1 2", expected="3")], compare)


@pytest.mark.parametrize("sandbox", USABLE)
def test_close_kills_running_programs(sandbox: str) -> None:
    before = traces()
    judge = SandboxPool(sandbox, workers=2, limits=Limits(cpu_seconds=60.0, wall_seconds=60.0))
    done = judge.submit(ADD, [TestCase("1 2", expected="3")], compare)
    assert done.result().accepted
    sleep = Program("print(input(), flush=True)\nimport time\ntime.sleep(60)")
    others = [judge.submit(sleep, [TestCase("a", expected="a")] * 8, compare) for _ in range(4)]
    while not all(other.running() for other in others[:2]):
        time.sleep(0.01)
    time.sleep(0.3)  # for the programs to start
    start = time.monotonic()
    judge.close()
    assert time.monotonic() - start < 2
    assert done.result().accepted
    for other in others:
        with pytest.raises(CancelledError):
            other.result()
    assert not left_since(before)
    judge.close()


def test_run_says_that_another_thread_closed_the_pool() -> None:
    judge = SandboxPool("none", workers=1, limits=Limits(cpu_seconds=60.0, wall_seconds=60.0))
    threading.Timer(0.5, judge.close).start()
    with pytest.raises(SandboxError, match="this SandboxPool was closed while it ran"):
        judge.run(Program("import time\ntime.sleep(60)"), [TestCase("")] * 8, compare)


def test_no_descriptor_stays_if_the_data_of_a_program_cannot_be_sealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("treegen.tasks.sandbox.process.fcntl.fcntl", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no memory"):
        _make_sealed_file(b"data")
    assert os.listdir("/proc/self/fd") == before


def test_no_sandbox_must_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("treegen.tasks.sandbox.landlock.version", lambda: 0)
    with pytest.raises(SandboxError, match=r"bwrap is not installed.*no Landlock.*sandbox='none'"):
        SandboxPool("auto")
    with SandboxPool("none", workers=1) as judge:
        assert judge.report.tier == "none"
        assert judge.report.missing
        result = judge.run(ADD, [TestCase("1 2", expected="3")], compare)
    assert result.accepted
    assert result.sandbox == "none"


def test_canaries_get_out_of_what_does_not_hold() -> None:
    with pytest.raises(SandboxError, match=r"does not isolate programs: .*read_host_file.*fork"):
        canaries.verify_tier(TIERS["none"], find_runtime())


@pytest.mark.parametrize("sandbox", USABLE)
def test_every_canary_was_able_to_get_out(sandbox: str) -> None:
    held, not_checked = canaries.verify_tier(TIERS[sandbox], find_runtime())
    assert len(held) + len(not_checked) == 17
    assert {"read_host_file", "write_host_file", "fork", "exceed_memory"} <= set(held)
    assert {"read_installed_package", "map_shared_memory", "lock_host_file"} <= set(held)


def test_a_sandbox_that_holds_is_tested_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[str] = []
    verify = canaries.verify_tier

    def count(tier: SandboxTier, *args: Any) -> Any:
        tested.append(tier.name)
        return verify(tier, *args)

    monkeypatch.setattr(canaries, "verify_once", functools.cache(count))
    reports = []
    for _ in range(2):
        with SandboxPool(USABLE[-1], workers=1) as judge:
            reports.append(judge.report)
    assert tested == [USABLE[-1]]
    assert reports[0] == reports[1] and "fork" in reports[0].held


def test_a_test_program_that_does_not_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(runtime, "_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(HelperKilledError, match=r"did not end within 0\.2 s; try again"):
        runtime._find_library_dirs(str(python))


@pytest.mark.skipif(not USABLE, reason="no sandbox can be used here")
def test_a_busy_machine_is_no_reason_for_a_weaker_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test program that gets no core in time says nothing about its sandbox."""
    monkeypatch.setattr(canaries, "_LIMITS", replace(LIMITS, cpu_seconds=0.2, wall_seconds=0.3))
    monkeypatch.setattr(canaries, "_USES_SCRATCH", "import time; time.sleep(9)")
    canaries.verify_once.cache_clear()
    with pytest.raises(HelperKilledError, match=r"did not end within 0\.3 s, 3 times in a row"):
        SandboxPool(workers=1)


def test_folders_of_canaries_that_died_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "treegen-canary-dead").mkdir()
    (tmp_path / "treegen-canary-dead" / "secret").touch()
    with canaries._plant_targets() as living, canaries._plant_targets() as other:
        folders = {str(folder) for folder in tmp_path.iterdir()}
        assert folders == {os.path.dirname(bait["secret"]) for bait in (living, other)}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "delay",
    [
        0.0,
        0.4,
        *(pytest.param(delay, marks=pytest.mark.soak) for delay in (0.02, 0.05, 0.1, 0.2)),
    ],
)
@pytest.mark.parametrize("sandbox", [*USABLE, "none"])
def test_nothing_survives_a_judge_that_is_killed(sandbox: str, delay: float) -> None:
    script = textwrap.dedent(f"""
        from treegen.tasks.sandbox import Limits, Program, SandboxPool, TestCase
        judge = SandboxPool({sandbox!r}, limits=Limits(cpu_seconds=60), workers=1)
        program = Program("open('left', 'w').write('x')\\nwhile True: pass")
        judge.submit(program, [TestCase()], lambda *_: True)
        import time; print("running", flush=True); time.sleep(60)
    """)
    before = traces()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        time.sleep(delay)  # from before its helper is started to when the program runs
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.5)  # a helper that is still starting shows nothing yet
    assert left_since(before) == set()


def test_throughput(judge: SandboxPool) -> None:
    """What a test costs in CPU time, which other work on the machine does not add to."""
    judge.run(ADD, [TestCase("1 2", expected="3")], compare)
    futures = [judge.submit(ADD, [TestCase("1 2", expected="3")] * 5, compare) for _ in range(40)]
    results = [future.result() for future in futures]
    assert all(result.accepted for result in results)
    each = sum(test.seconds for result in results for test in result.tests) / 200
    assert each < 1 / 40, f"{each:.4f} s of a core for each test"


@pytest.mark.parametrize(
    "sandbox",
    [*USABLE[-1:], *(pytest.param(name, marks=pytest.mark.soak) for name in USABLE[:-1])],
)
def test_programs_that_wait_hold_up_the_others_for_a_tenth_of_the_time(sandbox: str) -> None:
    """However much of their time they work, less than what a program alone has to or more."""
    limits = Limits(cpu_seconds=1.0, wall_seconds=1.5)
    sources = []
    for work in (0.06, 0.3, 0.6):
        sources.append(
            f"import time\nwhile True:\n  end = time.process_time() + {work} / 4\n"
            f"  while time.process_time() < end: pass\n  time.sleep({1.0 - work} / 4)"
        )
    with SandboxPool(sandbox, limits=limits, workers=3) as judge:
        futures = [
            judge.submit(Program(s), [TestCase(expected="")] * 2, compare) for s in sources * 2
        ]
        results = [future.result().tests for future in futures]
        quiet = judge._gate
        judged = quiet._shared_seconds / judge.workers
        # The last one to be alone began within its share. It waited for others at most, and ran.
        assert quiet._alone_seconds < 0.1 * judged + 2 * limits.wall + 1.0
    assert all(test.verdict is ProgramStatus.TIMEOUT for tests in results for test in tests)
    assert all(sum(test.retried for test in tests) <= 1 for tests in results)


def test_one_program_runs_alone_at_a_time() -> None:
    quiet = _ExclusiveGate(workers=2)

    def ask() -> bool:
        with quiet.alone_if_cheap() as alone:
            return alone

    with ThreadPoolExecutor(1) as executor:
        with quiet.alone_if_cheap() as first:
            second = executor.submit(ask)
            time.sleep(0.1)
            assert first
            assert not second.done()  # waits for the first, to go beside others
        assert not second.result()
    quiet._shared_seconds, quiet._alone_seconds = 19.9, 1.0
    with quiet.alone_if_cheap() as alone:
        assert not alone
    quiet._shared_seconds = 20.0
    with quiet.run_shared():
        pass
    with quiet.alone_if_cheap() as alone:
        assert alone


CHATTY = """
import os, time
end = time.monotonic() + 1.0
while time.monotonic() < end:
    os.write({stream}, b"x")
    time.sleep(2e-5)
"""


@pytest.mark.parametrize("stream", [1, 2, 3])
def test_a_program_that_writes_byte_by_byte_costs_little_here(
    judge: SandboxPool, stream: int
) -> None:
    judge.run(ADD, [TestCase("1 2", expected="3")], compare)
    before = time.process_time()
    result = judge.run(Program(CHATTY.format(stream=stream)), [TestCase(expected="")], compare)
    assert time.process_time() - before < 0.1  # of 1 s; it took 0.2 where each byte was read
    assert result.tests[0].wall_seconds > 0.9
