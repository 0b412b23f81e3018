"""Tree losses over weights that FSDP2 has sharded, against a single process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("trl.trainer", reason="needs trl")


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    program = str(Path(__file__).parents[1] / "sharded_ranks.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, program, str(tmp_path / "store")]
    with subprocess.Popen(command, env=environment, process_group=0) as ranks:
        try:
            assert ranks.wait(timeout=600) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
