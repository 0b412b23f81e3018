"""Weights that change while two processes draw samples of one model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_tokenizer
from torch import nn

from treegen import LLM, Node, SamplingParams
from treegen.errors import CapacityError, InputError
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup
from treegen.model.training import weight_updates

TREE = Node(
    "Q: Ann has 3 apples and Bob 14.\nA: The answer is 17.\n\n",
    children=[Node(f"Q: {name} has 14 pens.\nA:", samples=3) for name in ("Bob", "Cy", "Di")],
    samples=0,
)
PARAMS = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral_swa": {"vocab_size": 321},  # which two do not divide
    "mixtral": {},
    "deepseek_v3": {},  # a buffer in the router
}


def load(group: RankGroup, path: Path, **loading: Any) -> LLM:
    model = group.load(partial(load_model, str(path), check=False, **loading))
    return LLM(model, tokenizer=tiny_tokenizer(), memory="4MiB", max_rows=16)


def alone(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", memory="4MiB", max_rows=16, check=False, **options)


def draw(llm: LLM, updates: dict[int, Callable[[], Any]]) -> dict[Any, Any]:
    """Return tokens and versions of all samples; weights change after some decode steps."""
    drawn = {}
    with llm.stream(TREE, PARAMS) as stream:
        while stream.has_work:
            for sample in stream.step():
                drawn[sample.prompt_id, sample.index] = sample.tokens, sample.versions
            if update := updates.pop(stream.usage.decode_steps, None):
                update()
    assert not updates
    return drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_draw_as_one_process_while_weights_change(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    old, new = (
        save_tiny_model(tmp_path / str(seed), family, seed=seed, **FAMILIES[family])
        for seed in (0, 1)
    )
    stock: Any = load_model(new, check=False, device="cpu").module
    half = {name: weight.bfloat16() for name, weight in stock.named_parameters()}
    drawn = []
    for llm in (alone(old), load(group, old)):

        def update(weights: Any, mode: Any, llm: LLM = llm) -> Callable[[], Any]:
            return lambda: llm.update(weights, cache=mode)

        updates = {3: update(new, "keep"), 7: update(half, "shared"), 11: update(stock, "all")}
        drawn.append(draw(llm, updates))
        drawn[-1]["fingerprint"] = llm.fingerprint, llm.weights_version
        drawn[-1]["after"] = draw(llm, {})
    assert drawn[0] == drawn[1]
    versions = {versions for _, versions in list(drawn[1].values())[:9]}
    assert {version for spans in versions for version, _ in spans} == {0, 1, 2, 3}


def test_a_failed_update_changes_no_rank(group: RankGroup, tmp_path: Path) -> None:
    old, new = (save_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    other = save_tiny_model(tmp_path / "other", "qwen2")
    llm = load(group, old)
    want = draw(llm, {})
    stock: Any = load_model(new, check=False, device="cpu").module
    weights = dict(stock.named_parameters())
    head = weights.pop("lm_head.weight")
    wrong: dict[str, Any] = {
        "have no lm_head": weights,
        "not finite": {**weights, "lm_head.weight": torch.full_like(head, torch.nan)},
        r"must have shape \[320, 32\]": {**weights, "lm_head.weight": head[:160]},
        "got int": 3,
        "config.json has model_type 'qwen2', but the model has 'llama'": other,
    }
    for message, each in wrong.items():
        with pytest.raises(InputError, match=message):
            llm.update(each)
    assert draw(llm, {}) == want and llm.weights_version == 0
    llm.update(nn.Module.to(stock, torch.bfloat16))
    assert llm.weights_version == 1 and draw(llm, {}) != want


def test_each_rank_rounds_its_shard_to_fp8(group: RankGroup, tmp_path: Path) -> None:
    old, new = (save_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    llm = load(group, old, quantization="fp8")
    llm.update(load_model(new, check=False, device="cpu").module)
    got = draw(llm, {})
    fresh = draw(load(group, new, quantization="fp8"), {})
    assert {name: tokens for name, (tokens, _) in got.items()} == {
        name: tokens for name, (tokens, _) in fresh.items()
    }


def test_weights_whose_check_runs_out_of_memory_change_no_rank(
    group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    llm = load(group, save_tiny_model(tmp_path))
    want = draw(llm, {})
    with monkeypatch.context() as patched:
        patched.setattr(weight_updates, "_is_finite", fail)
        with pytest.raises(CapacityError, match="cpu has no memory left to check the new weights"):
            llm.update(str(tmp_path))
    assert draw(llm, {}) == want and llm.weights_version == 0
