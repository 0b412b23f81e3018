"""What writers that were killed have left: the next one removes it, and nothing else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treegen.runs.files import read_json, write_json

KILLED = """
import os, signal, sys
from pathlib import Path
from treegen.common import files
files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from treegen.runs.files import write_json
write_json(Path(sys.argv[1]), {"killed": True})
"""


@pytest.mark.parametrize("name", ["results.json", "judging.json", "model.json"])
def test_scratch_files_of_a_killed_writer_are_removed(tmp_path: Path, name: str) -> None:
    stem = name.removesuffix(".json")
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], check=False)
        assert done.returncode == -signal.SIGKILL
        assert len([*tmp_path.glob("*.tmp")]) == 1
    (tmp_path / f"{stem}.123.tmp").write_text("{")  # of an earlier version
    others = {f"{stem}.backup.tmp", f"{stem}.1x.tmp", f"{name}.tmp", f"x{name}.1.tmp"}
    for each in others:
        (tmp_path / each).write_text("somebody's own")
    (tmp_path / f"{name}.5.tmp").mkdir()
    write_json(tmp_path / name, {"killed": False})
    left = {each.name for each in tmp_path.glob("*.tmp")}
    assert left == {*others, f"{name}.5.tmp"}
    assert read_json(tmp_path / name) == {"killed": False}
