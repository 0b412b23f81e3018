"""Latents of checkpoints as they are stored: what a token takes, and weights in few bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_cases import FAMILIES, force, load, ragged
from packed_checkpoints import store_exact, store_in_int4, store_packed
from tiny_models import known, save_tiny_model
from transformers import AutoConfig

from treegen import SamplingParams
from treegen.errors import ModelWarning
from treegen.model.checkpoint_report import inspect_checkpoint
from treegen.model.latent import is_latent_layer
from treegen.model.options import EngineOptions

# Widths that packed words of eight numbers divide.
_EVEN: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_its_latents_and_no_more(family: str, tmp_path: Path) -> None:
    """As `treegen models`, a plan and the tensors of the cache have it."""
    if not known(family):
        pytest.skip(f"this transformers has no {family}")
    path = save_tiny_model(tmp_path, family, seed=1)
    llm, config = load(path), AutoConfig.from_pretrained(path)
    attending = [part for part in llm.model.module.modules() if is_latent_layer(part)]
    least = (config.kv_lora_rank + config.qk_rope_head_dim) * 4 * len(attending)
    document = inspect_checkpoint(EngineOptions(model=str(path), device="cpu")).document
    plan = llm.plan(ragged(2), _PARAMS)
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in llm.cache.layers
        for tensor in (layer.keys, layer.values)
    }
    pool = llm.cache.pool
    allocated = sum(stored.values()) / ((pool.num_pages + 1) * llm.cache.page_size)
    for each in (document["kv_bytes_per_token"], plan.token_bytes, allocated):
        assert least <= each <= 1.05 * least
    assert document["latents"]
    assert document["expanded_bytes_per_token"] == 4 * (12 + 6) * 4 * len(attending)
    assert len(attending) == len(llm.spec.layers) and llm.model.can_expand_latents
    # What is read expanded lies in pages of the same pool, and is named beside it.
    copied = sum(segment.expanded for segment in plan.segments)
    assert (plan.copied_tokens > 0) == (copied > 0) == ("read expanded" in str(plan))
    assert plan.copy_bytes == plan.copied_tokens * llm.spec.copy_pages * least


def _drawn(path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        force(form, patch)
        return list(load(path, sharing="all").run(ragged(), _PARAMS).completions)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", "gptq-act-order"),
        ("glm4_moe_lite", "awq"),
        ("minicpm3", "gptq"),
        ("deepseek_v2", "int4"),
    ],
)
def test_packed_weights_are_expanded_before_they_are_absorbed(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_model(tmp_path / "source", family, seed=1, **_EVEN)
    if layout == "int4":
        pytest.importorskip("compressed_tensors")
        exact = store_in_int4(source, tmp_path / "packed")
    else:
        exact = store_packed(source, tmp_path / "packed", layout)
    store_exact(source, tmp_path / "plain", exact, torch.float32)
    assert sum("kv_b_proj" in name for name in exact) >= 1
    want = _drawn(tmp_path / "plain", "absorbed", monkeypatch)
    for form in ("absorbed", "expanded"):
        found = _drawn(tmp_path / "packed", form, monkeypatch)
        for actual, expected in zip(found, want, strict=True):
            assert actual.tokens == expected.tokens
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=3e-5)
