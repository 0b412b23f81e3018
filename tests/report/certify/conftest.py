"""A certified run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from treegen import demo, evaluate
from treegen.evals.pipeline.listener import Listener
from treegen.report.certify.build import write_certificate


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certified run of the demo model, in a folder with copies of the model and the data."""
    folder = tmp_path_factory.mktemp("certified")
    shutil.copytree(demo.model_path(), folder / "model")
    for name in ("words.jsonl", "words_fewshot.jsonl"):
        shutil.copy(demo.data_path(name), folder / name)
    settings: dict[str, Any] = {
        "data": str(folder / "words.jsonl"),
        "fewshot_file": str(folder / "words_fewshot.jsonl"),
        "task_args": {"form": "self-consistency"},
    }
    evaluate(
        "gsm8k",
        str(folder / "model"),
        output=folder / "run",
        limit=4,
        num_samples=5,
        log_tokens=True,
        progress=False,
        **settings,
    )
    write_certificate(folder / "run", {}, Listener())
    return folder
