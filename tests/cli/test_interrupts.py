"""Signals at moments at which Python drops exceptions."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, time
from treegen.cli.terminal.interrupts import raising_signals, received

class Object:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

with raising_signals():
    Object()
    print(received())
"""
# A module that swallows exceptions during its import, as extensions of torch do.
MODULE = """
import os, signal, time

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    print("whole", flush=True)
except BaseException:
    pass
"""
IMPORTING = """
import sys, time
from treegen.cli.terminal import interrupts

interrupts._MAX_IMPORT_SECONDS = float(sys.argv[1])
try:
    with interrupts.raising_signals():
        import swallowing
        time.sleep(10)
except interrupts.Interrupted as stopped:
    print(stopped)
"""


def run(*args: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Return the exit code and the outputs of a program."""
    done = subprocess.run(
        [sys.executable, "-c", *args], check=False, capture_output=True, text=True, cwd=cwd
    )
    return done.returncode, done.stdout, done.stderr


def test_a_signal_in_a_destructor_is_polled_and_prints_nothing() -> None:
    assert run(PROGRAM) == (0, "2\n", "")


def test_a_signal_during_an_import_ends_the_command_after_the_import(tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text(MODULE)
    assert run(IMPORTING, "60", cwd=tmp_path) == (0, "whole\nstopped by SIGINT\n", "")


def test_a_long_import_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text(MODULE.replace("except BaseException", "finally"))
    assert run(IMPORTING, "0.05", cwd=tmp_path) == (0, "stopped by SIGINT\n", "")
