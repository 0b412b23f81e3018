"""Signals at moments at which Python drops exceptions."""

import subprocess
import sys

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


def test_a_signal_in_a_destructor_is_polled_and_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
