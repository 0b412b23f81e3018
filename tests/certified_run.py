"""A certified run of the demo model, for tests of certificates."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from treegen import demo, evaluate
from treegen.evals.pipeline.listener import Listener
from treegen.report.certify.build import write_certificate


def make_certified_run(folder: Path) -> Path:
    """Write a certified run into a folder, with copies of the model and the data."""
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


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certified run, its model and its data."""
    return make_certified_run(tmp_path_factory.mktemp("certified"))


@pytest.fixture
def copied(certified: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose model and data stay where they are."""
    return shutil.copytree(certified / "run", tmp_path / "run")
