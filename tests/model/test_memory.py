"""What the cache gets of a GPU's memory, and what is left for a pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from treegen.common.spec import LatentSpec, LayerSpec, ModelSpec
from treegen.model import memory
from treegen.model.load import load_model

GPU = torch.device("cuda:0")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that a GPU says are free."""
    free = [0]
    monkeypatch.setattr(memory, "empty_device_cache", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**40))
    return free


def test_a_pass_keeps_what_it_needs_of_a_small_gpu(free: list[int]) -> None:
    free[0] = 100 << 30
    assert memory.default_bytes(GPU, 1 << 30) == free[0] - int(free[0] * 0.15)
    free[0] = 8 << 30
    assert memory.default_bytes(GPU, 2 << 30) == (8 << 30) - (5 << 29) - (1 << 28)
    free[0] = 1 << 30
    assert memory.default_bytes(GPU, 2 << 30) == 0


def test_the_logits_of_a_pass_fit_beside_the_cache(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 28)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 28)
    most = []
    for free[0] in (0, 1 << 29, 3 << 28, 3 << 29, 100 << 30):
        most.append(memory.max_prefill_logits(GPU))
    assert most == [2**26, 2**27, 2**27, 2**28, 2**28]
    assert memory.max_prefill_logits(torch.device("cpu")) == 2**26


@pytest.mark.parametrize("family", ["llama", "gemma3n", "gpt2", "mixtral", "phi3"])
def test_activations_are_those_of_the_widest_layer(family: str, tmp_path: Path) -> None:
    """At least a gate, what it multiplies, their product and the layer's input; never logits."""
    path = tiny_models.save_tiny_model(tmp_path, family)
    module = load_model(path, device="cpu", check=False).module
    config = module.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = inner[0] if isinstance(inner, list) else inner
    each = memory.activation_bytes(module, 1)
    assert 4 * (3 * inner + config.hidden_size) <= each <= 4 * 40 * (inner + config.hidden_size)
    assert memory.activation_bytes(module, 100) == 100 * each


def test_a_pass_of_a_common_model_takes_about_a_gigabyte() -> None:
    """8B in passes of 8,192 tokens: far less than an H200 leaves, more than 15% of some cards."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert 2**29 < memory.activation_bytes(module, 8192) < 2**30


@pytest.mark.parametrize(("num_rows", "measured"), [(256, 646), (2048, 1376), (8192, 3165)])
def test_selecting_keys_takes_no_more_than_is_left_for_it(num_rows: int, measured: int) -> None:
    """The peaks in MiB are those of GLM-5 and DeepSeek-V3.2 in bfloat16."""
    latent = LatentSpec(heads=128, rank=512, rope=64, nope=128, v_dim=128)
    layer = LayerSpec(1, latent.cached_dim, latent.rank, None, latent, index_dim=128)
    spec = ModelSpec("m", "m", (layer,), 9, 9, (), 2, index_topk=2048)
    left = memory.selection_bytes(spec, num_rows, 2) / 2**20
    assert measured < left < 2 * measured + 1024
    assert memory.selection_bytes(replace(spec, index_topk=0), num_rows, 2) == 0
    # The tokens of a block are read together, and each index head has positions of its own.
    blocks = memory.selection_bytes(replace(spec, index_pool=16), num_rows, 2)
    assert blocks - left * 2**20 >= num_rows * 16 * 128 * (2 + 4)
    heads = memory.selection_bytes(replace(spec, index_selections=4), num_rows, 2)
    assert heads - left * 2**20 >= num_rows * 3 * 2048 * 4
