"""Killed at random moments, and called again: the columns are those of a call in peace."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_cases import write_jsonl
from fork_server import ForkServer
from tiny_models import save_tiny_model

KILLS = int(os.environ.get("TREEGEN_TEST_KILLS", "20"))
SERVER = """
import sys
from pathlib import Path
import torch
from fork_server import serve
from treegen import LLM
from treegen.integrations.score_texts import score_texts

def run(folder):
    for _ in score_texts(llm, Path(texts), Path(folder), top=3, part=150):
        pass

torch.set_num_threads(1)
model, texts = sys.argv[1:]
llm = LLM(model, check=False, device="cpu", dtype="float32", memory="8MiB")
serve(run)
"""


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
    texts = write_jsonl(tmp_path / "texts.jsonl", lines)
    with ForkServer(SERVER, save_tiny_model(tmp_path / "model"), texts) as server:
        whole, folder = tmp_path / "whole", tmp_path / "killed"
        begun = time.monotonic()
        assert server.run(str(whole)) == 0
        lasts, chance, kills = time.monotonic() - begun, random.Random(0), 0
        reached: set[int] = set()
        while kills < KILLS:
            code = server.run(str(folder), chance.uniform(0.1, 1) * lasts)
            assert code <= 0
            kills += code == -signal.SIGKILL
            reached.add(len(list(folder.glob("*.parquet"))))
            if len(list(folder.glob("*.parquet"))) == len(list(whole.glob("*.parquet"))):
                assert server.run(str(folder)) == 0
                assert rows_of(folder) == rows_of(whole)
                shutil.rmtree(folder)
        assert server.run(str(folder)) == 0
        assert rows_of(folder) == rows_of(whole) and len(rows_of(whole)) == len(lines)
        assert not list(folder.glob("*.tmp")) and len(reached) > 2
