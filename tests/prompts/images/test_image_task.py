"""A file of questions with images, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, samples_of, write_jsonl
from tiny_images import picture, save_tiny_vision_model


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "llava", seed=1)


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed in (1, 2):
        picture(seed).save(folder / f"{seed}.png")
    rows: list[dict[str, Any]] = [
        {"id": "a", "question": "What is it?", "answer": "1", "image": "1.png"},
        {"id": "b", "question": "How many?", "answer": "2", "image": "1.png"},
        {"id": "c", "question": "Which?", "answer": "3", "image": ["1.png", "2.png"]},
        {"id": "d", "question": "None", "answer": "4", "image": None},
    ]
    return write_jsonl(folder / "questions.jsonl", rows)


def test_questions_on_images(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, tmp_path: Path
) -> None:
    command, out = Command(capsys), tmp_path / "run"
    args = ["--data", data, "-M", model, "--images", "-T", "image_field=image"]
    planned = command("plan", "jsonl", *args, "-n", 8, "--json")
    assert planned.code == 0, planned.err
    args += ["--max-tokens", 5, "-q"]
    done = command("eval", "jsonl", *args, "-n", 8, "-o", out)
    assert done.code == 0, done.err
    assert len(samples_of(out)) == 32
    usage = json.loads((out / "results.json").read_text())["usage"]
    assert usage["images_encoded"] == 2
    assert usage["prompt_tokens_computed"] < usage["prompt_tokens_unshared"] / 8
    assert command("score", out, "-q").code == 0
    shown = command("show", out, "--tree", "a")
    assert shown.code == 0, shown.err
    assert "1.png" in shown.out
    assert command("report", out).code == 0
    picture(3).save(data.parent / "1.png")
    assert "problems" in command("eval", "--resume", out, "-q").error


def test_what_cannot_be_asked_is_told_before_weights_load(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, no_weights: None
) -> None:
    command = Command(capsys)
    asked = ["eval", "jsonl", "--data", data, "-M", model, "-T", "image_field=image"]
    assert "--images" in command(*asked).error
    assert "--num-fewshot" in command(*asked, "--images", "--num_fewshot", 2).error
    (data.parent / "2.png").write_bytes(b"GIF89a")
    told = command("plan", *asked[1:], "--images")
    assert told.code == 0
    assert "2.png" in told.err
