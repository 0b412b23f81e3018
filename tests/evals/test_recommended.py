"""Sampling as generation_config.json recommends it: read, taken, mentioned, noted in run.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, build_checkpoint
from tiny_models import save_tiny_model

from treegen import LLM, AsyncLLM, InputError, ModelError, ModelWarning, SamplingParams
from treegen.model.checkpoint.generation_config import (
    difference_from_generate,
    recommended_sampling,
)
from treegen.model.config import load_spec

QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1]}
SMALL = ("--limit", "2", "--n-samples", "2", "--max-tokens", "6", "--memory", "4MiB")


def recommend(directory: Path, **settings: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recommend(build_checkpoint(tmp_path_factory.mktemp("recommends")), **QWEN)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (QWEN, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"eos_token_id": 3, "max_new_tokens": 9}, {}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"temperature": 0.7, "top_k": -1, "top_p": None}, {"temperature": 0.7, "top_k": 0}),
        (
            {"do_sample": True, "temperature": 1e-06, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
        ),
    ],
)
def test_a_file_is_read_as_transformers_and_vllm_read_it(
    settings: dict[str, Any], want: dict[str, Any], tmp_path: Path
) -> None:
    assert dict(recommended_sampling(recommend(tmp_path, **settings))) == want


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (QWEN, ""),
        ({"eos_token_id": 3}, ""),
        (
            {**QWEN, "typical_p": 1.0, "epsilon_cutoff": 0.0, "bad_words_ids": [], "num_beams": 1},
            "",
        ),
        (
            {**QWEN, "typical_p": 0.9, "suppress_tokens": [3]},
            "treegen ignores typical_p, suppress_tokens",
        ),
        ({**QWEN, "epsilon_cutoff": 1e-3, "bad_words_ids": [[3]]}, "epsilon_cutoff, bad_words_ids"),
        ({"do_sample": True, "top_p": 0.9}, "without top_k, transformers keeps the 50 most likely"),
        ({"do_sample": False, "top_p": 0.9}, ""),
        ({"temperature": 0.7}, "without do_sample, transformers decodes greedily"),
    ],
)
def test_a_difference_from_generate_is_said_in_one_line(
    settings: dict[str, Any], note: str, tmp_path: Path
) -> None:
    found = difference_from_generate(recommend(tmp_path, **settings))
    assert note in found and bool(note) == bool(found) and "\n" not in found


def test_whoever_takes_it_is_warned(tmp_path: Path, treegen: Command) -> None:
    model = recommend(build_checkpoint(tmp_path / "model"), **QWEN, typical_p=0.9)
    llm = LLM(str(model), device="cpu", memory="4MiB", check=False)
    with pytest.warns(ModelWarning, match="treegen ignores typical_p"):
        SamplingParams.from_generation_config(llm)
    assert "treegen ignores typical_p" in treegen("models", model).out
    words = ("eval", "gsm8k", "--model", model, *SMALL)
    done = treegen(*words, "--sampling", "recommended", "-o", tmp_path / "best")
    assert done.code == 0 and done.err.count("treegen ignores typical_p") == 1
    assert "typical_p" not in treegen(*words, "-o", tmp_path / "own").err


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="recommends invalid sampling parameters: top_p must be"):
        recommended_sampling(recommend(tmp_path, top_p=3))


def test_python_takes_it(checkpoint: Path, tmp_path: Path) -> None:
    llm = LLM(str(checkpoint), device="cpu", memory="4MiB", check=False)
    want = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=7)
    assert SamplingParams.from_generation_config(llm, max_tokens=7) == want
    assert SamplingParams.from_generation_config(llm, temperature=1).temperature == 1
    with AsyncLLM(llm) as served:
        assert SamplingParams.from_generation_config(served, max_tokens=7) == want
    save_tiny_model(tmp_path, "llama")
    plain = load_spec(tmp_path)
    with pytest.raises(InputError, match="with recommended sampling parameters"):
        SamplingParams.from_generation_config(type("Fake", (), {"spec": plain})())


def test_the_commands_tell_and_take_it(checkpoint: Path, tmp_path: Path, treegen: Command) -> None:
    done = treegen("models", checkpoint)
    assert "recommended sampling: temperature 0.6, top_p 0.95, top_k 20" in done.out
    assert done.document["recommended"]["top_k"] == 20

    words = ("eval", "gsm8k", "--model", checkpoint, *SMALL)
    done = treegen(*words, "-o", tmp_path / "own")
    line = "the checkpoint recommends --temperature 0.6, --top-p 0.95, --top-k 20; pass --sampling "
    assert done.code == 0 and done.err.count(line) == 1
    best = ("--sampling", "recommended", "--top-k", "5")
    done = treegen(*words, *best, "-o", tmp_path / "best")
    assert done.code == 0 and line in done.err  # another top_k was asked for
    info = json.loads((tmp_path / "best" / "run.json").read_text())["settings"]
    sampling = info["identity"]["sampling"]
    assert [sampling[name] for name in ("temperature", "top_p", "top_k")] == [0.6, 0.95, 5]
    sources = info["free"]["sources"]
    assert sources["temperature"] == sources["top_p"] == "checkpoint"
    assert sources["top_k"] == sources["max_tokens"] == "user" and sources["stop"] == "task"
    # A resume goes on as the run was begun, whatever is recommended by then.
    done = treegen("eval", "--resume", tmp_path / "best")
    assert done.code == 0 and line not in done.err
    done = treegen(*words, "--sampling", "recommended", "-o", tmp_path / "all")
    assert done.code == 0 and line not in done.err

    done = treegen("eval", "gsm8k", "--model", "demo", "--sampling", "recommended", *SMALL)
    assert done.code == 2 and "demo has no generation_config.json with sampling" in done.err
    done = treegen("eval", "gsm8k", "--model", "demo", "--sampling", "best", *SMALL)
    assert done.code == 2 and "--sampling must be recommended or task" in done.err


def test_samples_have_the_schema_of_a_file(
    checkpoint: Path, tmp_path: Path, treegen: Command
) -> None:
    pytest.importorskip("llguidance")
    file, path = tmp_path / "schema.json", tmp_path / "run"
    words = ("eval", "gsm8k", "--model", checkpoint, *SMALL, "-o", path, "--json-schema")
    file.write_text('{"type": "objekt"}')
    done = treegen(*words, file)
    assert done.code == 2 and "--json-schema cannot be used: Invalid type" in done.err
    assert not path.exists()
    file.write_text('{"enum": [1, 23]}')
    assert treegen(*words, file).code == 0
    lines = (path / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["text"].strip() for line in lines} <= {"1", "23"} and len(lines) == 4
    info = json.loads((path / "run.json").read_text())["settings"]
    assert json.loads(info["identity"]["sampling"]["json_schema"]) == {"enum": [1, 23]}
    assert treegen("eval", "--resume", path).code == 0
    done = treegen(*words, tmp_path / "none.json")
    assert done.code == 2 and "cannot be read" in done.err
