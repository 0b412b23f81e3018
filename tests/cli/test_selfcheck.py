"""`treegen selfcheck`: arrangements are counted, and a broken promise is an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from cli_cases import Command

import treegen.api.selfcheck as checks
from treegen.model.options import EngineOptions

WORDS = ["selfcheck", "--problems", "3", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.soak
def test_on_a_cpu_samples_stay_the_same(treegen: Command) -> None:
    done = treegen(*WORDS)
    assert done.code == 0, done
    found = done.document
    assert found["promised"] and found["same"] == found["samples"]
    names = [each["name"] for each in found["arrangements"]]
    assert "problem 2 alone" in names and "few pages" in names
    assert "|few pages " in done.out


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_models_with_recurrent_layers_are_checked_too(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family, max_position_embeddings=1024)
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", check=False)
    check = checks.SelfCheck(options, problems=3, max_tokens=8)
    found = {each.name: each for each in check.arrangements()}
    assert found["few pages"].samples == found["again"].to_the_bit == 24


def test_a_sample_that_differs_is_told(
    treegen: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Differs(checks.SelfCheck):
        def arrangements(self) -> Any:
            yield checks.Arrangement("again", 24, 23, 20, 0)

    monkeypatch.setattr(checks, "SelfCheck", Differs)
    words = [*WORDS, "--model", tiny]
    promised = treegen(*words)
    assert promised.code == 1 and "1 of 24 samples have other tokens" in promised.out
    other = treegen(*words, "--dtype", "bfloat16")  # where nothing is promised
    assert other.code == 0 and "rounding may change tokens" in other.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--problems", "2"], "--problems must be at least 3"),
        (
            ["--reproducible", "--dtype", "bfloat16", "--device", "cpu"],
            "reproducible on cpu requires the dtype float32",
        ),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_input(treegen: Command, words: list[str], message: str) -> None:
    assert message in treegen("selfcheck", *words, "-q").error
