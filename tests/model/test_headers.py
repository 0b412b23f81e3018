"""A configuration that is not of the weights beside it is refused before any weight is made."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cli_cases import edit_config
from safetensors.torch import load_file, save_file
from tiny_images import save_tiny_vision_model

from treegen import LLM
from treegen.errors import ModelError
from treegen.model.checkpoint.files import fingerprint
from treegen.model.config import check_headers
from treegen.model.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.save_tiny_model(tmp_path, "llama")
    return tmp_path


def check_refused_at_once(folder: Path, name: str, **options: Any) -> None:
    start = time.process_time()
    with pytest.raises(ModelError, match=f"sets {name} to 1,000,000,000, but the weights in"):
        LLM(str(folder), device="cpu", **options)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("method", [None, "compressed-tensors"])
def test_sizes_that_no_weight_has_are_refused_at_once(
    folder: Path, name: str, method: str | None
) -> None:
    more = {} if method is None else {"quantization_config": {"quant_method": method}}
    edit_config(folder, **{name: 10**9}, **more)
    check_refused_at_once(folder, name)


def test_of_a_size_that_wrapper_and_text_have_that_of_the_text_counts(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    # Configurations of Fuyu have a usual size of their own in older versions of transformers.
    check_headers(folder, {"text_config": raw, "vocab_size": 10**9})
    text = raw | {"vocab_size": 10**9}
    for wrong in ({"text_config": text}, {"text_config": text, "vocab_size": raw["vocab_size"]}):
        with pytest.raises(ModelError, match="sets vocab_size to 1,000,000,000, but the weights"):
            check_headers(folder, wrong)


def test_a_header_that_claims_more_than_headers_have_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((2**60).to_bytes(8, "little"))
    with pytest.raises(ModelError, match="declares a header of 1,152,921,504,606,846,984 bytes"):
        fingerprint(folder)
    with pytest.raises(ModelError):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize("images", [False, True])
def test_a_tower_of_layers_that_no_weight_has_is_refused_at_once(
    tmp_path: Path, images: bool
) -> None:
    save_tiny_vision_model(tmp_path, "qwen3_vl")
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    edit_config(tmp_path, vision_config=vision | {"depth": 10**9})
    check_refused_at_once(tmp_path, r"vision_config\.depth", images=images)


def test_whole_numbers_are_not_taken_for_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(key for key in weights if key.endswith("up_proj.weight"))
    save_file(weights | {name: weights[name].to(torch.int32)}, file, {"format": "pt"})
    with pytest.raises(
        ModelError, match=f"{name} in .* must be stored as floating-point numbers, got I32"
    ):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize("model_type", [["llama"], {"a": 1}, 3, None])
def test_a_model_type_that_is_no_text_is_refused(folder: Path, model_type: object) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(ModelError, match=r"model_type .* is not known"):
        LLM(str(folder), device="cpu")


def test_what_is_wrong_in_the_configuration_is_not_told_of_the_tokenizer(folder: Path) -> None:
    edit_config(folder, num_attention_heads="many")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder)
    assert "config.json" in str(caught.value) and "tokenizer" not in str(caught.value)


def test_every_tiny_family_has_the_sizes_that_it_says(tmp_path: Path) -> None:
    for name in ("llama", "gpt2", "qwen3_next", "gemma2", "mixtral"):
        path = tmp_path / name
        tiny_models.save_tiny_model(path, name)
        check_headers(path, json.loads((path / "config.json").read_text()))
