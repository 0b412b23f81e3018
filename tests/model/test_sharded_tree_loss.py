"""Tree losses over weights that FSDP2 has sharded, against a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl.trainer", reason="needs trl")


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    program = str(Path(__file__).parents[1] / "sharded_ranks.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(tmp_path / "store"), str(rank)], env=environment
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
