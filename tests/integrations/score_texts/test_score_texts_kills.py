"""Killed at random moments, and called again: the columns are those of a call in peace."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiny_models import save_tiny_model

KILLS = int(os.environ.get("TREEGEN_TEST_KILLS", "20"))
SERVER = """
import os, sys
from pathlib import Path
import torch
from treegen import LLM
from treegen.integrations.score_texts import score_texts

torch.set_num_threads(1)
model, texts = sys.argv[1:]
llm = LLM(model, check=False, device="cpu", dtype="float32", memory="8MiB")
print("ready", flush=True)
for folder in sys.stdin:
    pid = os.fork()
    if not pid:
        for _ in score_texts(llm, Path(texts), Path(folder.strip()), top=3, part=150):
            pass
        os._exit(0)
    print("pid", pid, flush=True)
    print("status", os.waitpid(pid, 0)[1], flush=True)
"""


class Calls(AbstractContextManager["Calls"]):
    """Calls of `score_texts`, each in a process of its own, which is forked from a loaded one."""

    def __init__(self, model: Path, texts: Path) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(model), str(texts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._read_line() == "ready"

    def __exit__(self, *_: object) -> None:
        self.server.communicate(timeout=60)

    def _read_line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def _number(self, kind: str) -> int:
        found, _, number = self._read_line().partition(" ")
        assert found == kind, f"the server told its {found}, not its {kind}"
        return int(number)

    def call(self, folder: Path, seconds: float | None = None) -> int:
        """Call it and kill it after some seconds; returns the signal that ended it, or 0."""
        assert self.server.stdin is not None
        self.server.stdin.write(f"{folder}\n")
        self.server.stdin.flush()
        pid = self._number("pid")
        assert pid > 1  # 0 and below are groups
        if seconds is not None:
            time.sleep(seconds)
            with suppress(ProcessLookupError):  # it is over
                os.kill(pid, signal.SIGKILL)
        status = self._number("status")
        assert os.WIFSIGNALED(status) or status == 0
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def rows_of(folder: Path) -> list[object]:
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_after_twenty_kills_no_text_is_lost_or_there_twice(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Once upon a time, " * (1 + i % 3), "completion": f"it had {i} leaves. " * 2}
        for i in range(36)
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with Calls(save_tiny_model(tmp_path / "model"), texts) as calls:
        whole, folder = tmp_path / "whole", tmp_path / "killed"
        begun = time.monotonic()
        assert calls.call(whole) == 0
        lasts, chance, kills = time.monotonic() - begun, random.Random(0), 0
        reached: set[int] = set()
        while kills < KILLS:
            code = calls.call(folder, chance.uniform(0.1, 1) * lasts)
            kills += code == signal.SIGKILL
            reached.add(len(list(folder.glob("*.parquet"))))
            if len(list(folder.glob("*.parquet"))) == len(list(whole.glob("*.parquet"))):
                assert calls.call(folder) == 0
                assert rows_of(folder) == rows_of(whole)
                shutil.rmtree(folder)
        assert calls.call(folder) == 0
        assert rows_of(folder) == rows_of(whole) and len(rows_of(whole)) == len(lines)
        assert not list(folder.glob("*.tmp")) and len(reached) > 2
