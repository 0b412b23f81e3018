"""Tasks of lm-eval whose few-shot examples may hold the problem itself: users are told."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl

import treegen
from treegen import LLM
from treegen.errors import ModelWarning

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks that differ in where their examples come from."""
    folder = tmp_path_factory.mktemp("tasks")
    for split in ("train", "validation", "test"):
        rows = [{"q": f"{split} {at}?", "a": f" {at}"} for at in range(5)]
        write_jsonl(folder / f"{split}.jsonl", rows)
    variants: dict[str, dict[str, Any]] = {
        "test_alone": {"test_split": "test"},
        "test_by_name": {"test_split": "test", "fewshot_split": "test"},  # it takes the problem out
        "validation_alone": {"validation_split": "validation"},
        "validation_by_name": {"validation_split": "validation", "fewshot_split": "validation"},
        "other": {"validation_split": "validation", "test_split": "test"},
        "train": {"training_split": "train", "test_split": "test"},
        "given": {
            "test_split": "test",
            "fewshot_config": {
                "sampler": "first_n",
                "samples": [{"q": "x?", "a": " y"}, {"q": "z?", "a": " y"}],
            },
        },
    }
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation", "test")}
    for name, own in variants.items():
        task = {
            "task": f"shots_{name}",
            "dataset_path": "json",
            "num_fewshot": 2,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2},
            "metric_list": [{"metric": "exact_match"}],
            **own,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", check=False, device="cpu", memory="32MiB")


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("test_alone", True),
        ("test_by_name", False),
        ("validation_alone", True),
        ("validation_by_name", True),
        ("other", False),
        ("train", False),
        ("given", False),
    ],
)
def test_a_problem_among_its_own_examples_is_told(
    name: str, holds: bool, folder: Path, llm: LLM, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        treegen.evaluate(
            f"lm-eval:shots_{name}@{folder}",
            llm,
            output=tmp_path / "run",
            progress=False,
            allow_task_code=True,
        )
    messages = {str(each.message) for each in record if each.category is ModelWarning}
    warned = [each for each in messages if "few-shot examples" in each]
    assert len(warned) == holds, messages
    if holds:
        assert f"shots_{name} draws its 2 few-shot examples" in warned[0]
