"""Helpers of the sandbox that are killed: they are started again, and the signal is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_cases import LIMITS, USABLE, compare
from processes import Process, descendants

from treegen.tasks.sandbox import Program, ProgramStatus, SandboxPool, TestCase
from treegen.tasks.sandbox.canaries import verify_once
from treegen.tasks.sandbox.isolation import TIERS
from treegen.tasks.sandbox.pool import decide
from treegen.tasks.sandbox.process import ProcessOutcome, SandboxProcess
from treegen.tasks.sandbox.programs import HelperKilledError, SandboxError
from treegen.tasks.sandbox.runtime import find_runtime

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not USABLE, reason="no sandbox can be used here"
)
FOREVER = 10**6


@pytest.fixture(autouse=True)
def _forget_tests() -> None:
    """Test every sandbox anew, because the helpers of these tests are killed."""
    verify_once.cache_clear()


@contextmanager
def killing(most: int, number: int = signal.SIGKILL) -> Iterator[set[Process]]:
    """Kill the first helpers that this process starts; yields which."""
    killed: set[Process] = set()
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < most:
            for process, name in descendants(os.getpid()).items():
                if "treegen.tasks.sandbox.helper" in name and process not in killed:
                    killed.add(process)
                    os.kill(process[0], number)
                    if len(killed) == most:
                        break

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@contextmanager
def killing_at_start(most: int, number: int = signal.SIGKILL) -> Iterator[list[int]]:
    """Start processes that a signal ends in place of the first helpers; yields their ids."""
    killed: list[int] = []
    here = threading.get_ident()  # pools of other tests may replace helpers in their own threads
    start = subprocess.Popen.__init__

    def start_and_kill(process: Any, command: Any, **options: Any) -> None:
        is_helper = any("treegen.tasks.sandbox.helper" in str(part) for part in command)
        if is_helper and threading.get_ident() == here and len(killed) < most:
            start(process, ["/bin/sh", "-c", f"kill -{int(number)} $$"], **options)
            killed.append(process.pid)
        else:
            start(process, command, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess.Popen, "__init__", start_and_kill)
        yield killed


@pytest.mark.parametrize("sandbox", [*USABLE, "none"])
def test_a_helper_that_is_killed_while_it_starts_is_started_again(sandbox: str) -> None:
    with killing_at_start(1) as killed, SandboxPool(sandbox, limits=LIMITS, workers=1) as judge:
        assert len(killed) == 1
        assert judge.report.tier == sandbox
        result = judge.run(Program("print(1)"), [TestCase(expected="1\n")], compare)
        assert result.verdict is ProgramStatus.ACCEPTED


@pytest.mark.parametrize("sandbox", ["auto", "none"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_helpers_do_not_mean_that_the_sandbox_fails(
    sandbox: str, number: signal.Signals
) -> None:
    with killing_at_start(FOREVER, number) as killed, pytest.raises(HelperKilledError) as error:
        SandboxPool(sandbox, limits=LIMITS, workers=1)
    assert len(killed) == 3
    assert f"helper was ended by {number.name} while" in str(error.value)
    assert "install" not in str(error.value)


def test_a_helper_that_crashes_means_that_the_sandbox_fails() -> None:
    """The kernel may end a helper by such a signal; then the next sandbox is tried."""
    with killing_at_start(FOREVER, signal.SIGSYS), pytest.raises(Exception) as error:
        SandboxPool(USABLE[-1], limits=LIMITS, workers=1)
    assert not isinstance(error.value, HelperKilledError)
    assert "no sandbox works here" in str(error.value) and "SIGSYS" in str(error.value)


def test_a_helper_that_hangs_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, start = find_runtime(), subprocess.Popen.__init__

    def start_sleep(started: Any, command: Any, **options: Any) -> None:
        start(started, ["/bin/sleep", "60"], **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start_sleep)
    monkeypatch.setattr("treegen.tasks.sandbox.process._START_SECONDS", 0.1)
    monkeypatch.setattr("treegen.tasks.sandbox.process._HANG_UP_SECONDS", 0.1)
    with pytest.raises(SandboxError, match="helper did not respond while it started"):
        SandboxProcess(TIERS["none"], runtime, LIMITS)


def test_the_signal_of_a_helper_that_dies_between_programs_is_named() -> None:
    with SandboxPool(USABLE[-1], limits=LIMITS, workers=1) as judge:
        with killing(FOREVER):
            result = judge.submit(Program("print(1)"), [TestCase(expected="1\n")], compare).result()
        assert result.verdict is ProgramStatus.JUDGE_ERROR
        assert "ended by SIGKILL while" in result.tests[-1].detail
        again = judge.run(Program("print(1)"), [TestCase(expected="1\n")], compare)
        assert again.verdict is ProgramStatus.ACCEPTED


def test_output_of_a_killed_probe_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a probe that is killed has printed until then is not taken for all there is."""
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "_base_executable", str(python))
    python.write_text("#!/bin/sh\necho /usr/lib\nkill -9 $$\n")
    python.chmod(0o755)
    with pytest.raises(HelperKilledError, match="was ended by SIGKILL"):
        find_runtime.__wrapped__()
    once = f"[ -e {tmp_path}/killed ] || {{ touch {tmp_path}/killed; kill -9 $$; }}"
    python.write_text(f'#!/bin/sh\n{once}\nexec {sys.executable} "$@"\n')
    assert any("python" in path for path in find_runtime.__wrapped__().read)
    python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(SandboxError, match="failed: broken"):
        find_runtime.__wrapped__()


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (-9, ProgramStatus.JUDGE_ERROR),
        (-15, ProgramStatus.JUDGE_ERROR),
        (-11, ProgramStatus.COMPILE_ERROR),
    ],
)
def test_a_compiler_that_is_killed_is_no_compile_error(status: int, verdict: ProgramStatus) -> None:
    ended = {"status": status, "cpu": 0.1, "wall": 0.1, "memory": 1, "killed": None}
    outcome = ProcessOutcome(ended, b"", b"", b"ready\n", 100, overflow=False)
    result = decide(Program("x"), TestCase(expected=""), outcome, LIMITS, compare)
    assert result.verdict is verdict
