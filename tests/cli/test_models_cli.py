"""`treegen models`: the families of the code's tables, and what becomes of one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, edit_config, inspect_model
from quantized_checkpoints import store_in_fp8
from tiny_models import save_tiny_model

from treegen.common.formatting import format_bytes
from treegen.model.checkpoint.families import (
    EXACT,
    ON_TEXT,
    RECURRENT,
    REFUSED,
    SUPPORT_LEVELS,
    refusal,
)
from treegen.model.load import load_model


def test_families_are_those_of_the_code(treegen: Command) -> None:
    done = treegen("models")
    assert done.code == 0 and all(level in done.out for level in SUPPORT_LEVELS)
    document = done.document
    ways = {each["type"]: each["way"] for each in document["families"]}
    known = {
        "exact": [name for name in EXACT if not refusal(name)],
        "exact on text": ON_TEXT,
        "exact with recurrent layers": [name for names in RECURRENT.values() for name in names],
        "refused": [name for name in REFUSED if refusal(name)],
    }
    for way, names in known.items():
        for name in names:
            assert ways.get(name, way) == way  # older versions of transformers lack some
    whys = {each["type"]: each["why"] for each in document["families"]}
    assert whys["bloom"] == REFUSED["bloom"] and whys["bart"] == "is an encoder-decoder"
    assert all(bool(whys[name]) == (way == "refused") for name, way in ways.items())
    stored = {each["stored"]: each["becomes"] for each in document["weights"]}
    assert stored["other methods"].startswith("refused; ")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "mixtral"])
def test_one_checkpoint_is_told_from_its_configuration(
    family: str, tmp_path: Path, treegen: Command
) -> None:
    save_tiny_model(tmp_path, family)
    model = load_model(tmp_path, device="cpu")
    weights = tmp_path / "model.safetensors"
    size = weights.stat().st_size
    assert inspect_model(treegen, tmp_path)["stored_bytes"] == size
    weights.unlink()
    found = inspect_model(treegen, tmp_path)
    spec = model.spec
    assert found["way"] == ("exact with recurrent layers" if spec.states else "exact")
    assert found["weights"] == sum(weight.numel() for weight in model.module.parameters())
    assert found["weight_bytes"] == 4 * found["weights"]
    assert found["kv_bytes_per_token"] == spec.kv_bytes_per_token
    assert (found["layers"], found["recurrent_layers"]) == (len(spec.layers), len(spec.states))
    assert found["state_bytes"] == spec.state_bytes
    small = inspect_model(treegen, tmp_path, "--kv-cache-dtype", "fp8", "--dtype", "bfloat16")
    assert small["kv_bytes_per_token"] * 4 == found["kv_bytes_per_token"]
    assert small["weight_bytes"] * 2 == found["weight_bytes"]


def test_quantized_weights_are_told(tmp_path: Path, treegen: Command) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", "channel")
    plain = inspect_model(treegen, tmp_path / "fp8", "--device", "cpu")
    assert plain["stored"] == "compressed-tensors' FP8" and plain["quantization"] is None
    kept = inspect_model(treegen, tmp_path / "fp8", "--device", "cpu", "--quantization", "fp8")
    model = load_model(tmp_path / "fp8", device="cpu", quantization="fp8")
    small = sum(w.numel() for w in model.module.parameters() if w.itemsize == 1)
    assert kept["quantization"] == "fp8"
    assert kept["weight_bytes"] == plain["weight_bytes"] - 3 * small
    done = treegen("models", tmp_path / "fp8", "--device", "cpu", "--quantization", "fp8")
    assert "matrices in fp8; stored in compressed-tensors' FP8" in done.out
    split = [kept["quantized_bytes"], kept["weight_bytes"] - small]
    assert kept["quantized_bytes"] == small
    in_fp8, in_float = map(format_bytes, split)
    assert f"of this memory: {in_fp8} in fp8, {in_float} in float32" in done.out
    done = treegen("models", tmp_path / "fp8", "--device", "cpu")
    assert "nothing stays quantized, all is dequantized to float32" in done.out


def test_storage_is_told_apart_from_memory(tmp_path: Path, treegen: Command) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, dtype="bfloat16")
    found = inspect_model(treegen, tmp_path, "--device", "cpu")
    assert (found["stored"], found["dtype"], found["device"]) == ("bfloat16", "float32", "cpu")
    size = format_bytes((tmp_path / "model.safetensors").stat().st_size)
    done = treegen("models", tmp_path, "--device", "cpu")
    memory = format_bytes(found["weight_bytes"])
    assert f"in memory on cpu {memory} in float32; stored in bfloat16, {size} in files" in done.out
    assert "of this memory" not in done.out


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "bloom"}, "ALiBi"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "gptq weights with bits None and group_size None",
        ),
        ({"model_type": "unheard-of"}, "is not known to transformers"),
        ({"max_position_embeddings": 0}, "has no max_position_embeddings"),
        ({"text_config": ["llama"]}, "must be an object, got ['llama']"),
    ],
)
def test_what_is_refused_is_told_with_why(
    changes: dict[str, Any], why: str, tmp_path: Path, treegen: Command
) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, **changes)
    found = inspect_model(treegen, tmp_path)
    assert why in found["refused"] and "weights" not in found
    done = treegen("models", tmp_path)
    assert "refused: " in done.out and why in " ".join(done.out.split())


def test_what_cannot_be_read_is_an_error(tmp_path: Path, treegen: Command) -> None:
    for words in ([tmp_path / "nothing"], [tmp_path], ["demo", "--dtype", "int3"]):
        done = treegen("models", *words)
        assert done.code == 2 and done.err.startswith("Error: ")
