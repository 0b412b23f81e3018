"""Models that take images, computed by two processes together, as one process computes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import forked_ranks
from image_cases import far, tree_of
from tiny_images import MAKERS, NEEDED, picture, save_tiny_vision_model

from treegen import LLM, SamplingParams
from treegen.model.config import read_config
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup
from treegen.model.tokenizer import load_tokenizer
from treegen.model.vision import load_processor

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, seed=4, ignore_eos=True, temperature=0.8)
WHOLE = "qwen3_5", "qwen3_vl"  # recurrent layers; transformers has no plan to divide it
LIMIT = 2e-5  # of log-probabilities: each side is rounded by its own order of sums


def load(group: RankGroup, directory: Path, **options: Any) -> LLM:
    """What `LLM(..., tensor_parallel_size=2)` loads, in processes that are there already."""
    model = group.load(partial(load_model, str(directory), images=True))
    tokenizer = load_tokenizer(str(directory))
    processor = load_processor(directory, read_config(str(directory), directory), tokenizer)
    model.images = processor.enable_images(tokenizer, model.spec.vocab_size)
    return LLM(model, tokenizer=tokenizer, memory="16MiB", **options)


def check_same(one: LLM, two: LLM) -> None:
    root, prompts = tree_of(picture(1), picture(2, 30, 61))
    for params in (GREEDY, DRAWN):
        want, got = one.run(root, params), two.run(root, params)
        for actual, expected in zip(got.completions, want.completions, strict=True):
            assert actual.token_ids == expected.token_ids
            assert far(actual.logprobs, expected.logprobs) < LIMIT
    assert two.engine.encoder_cache is not None
    assert two.engine.encoder_cache.num_encoded == 2
    pairs = [(prompts[name], " the house") for name in ("b", "other", "none")]
    for scored, expected_score in zip(two.score(pairs), one.score(pairs), strict=True):
        assert far(scored.logprobs, expected_score.logprobs) < LIMIT


def test_two_ranks_take_images(tmp_path: Path) -> None:
    """Rank 0 alone has a tower, and sends what it gives."""
    directory = save_tiny_vision_model(tmp_path, "qwen2_vl", seed=1)
    one = LLM(str(directory), images=True, device="cpu", memory="16MiB")
    options: dict[str, Any] = {"tensor_parallel_size": 2, "prefill_chunk": 16, "page_size": 4}
    with forked_ranks():
        two = LLM(str(directory), images=True, device="cpu", memory="16MiB", **options)
    try:
        check_same(one, two)
    finally:
        two.close()


@pytest.mark.soak
@pytest.mark.parametrize("family", [name for name in MAKERS if name not in WHOLE])
def test_two_ranks_take_images_of_every_family(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    if family in NEEDED:
        pytest.importorskip(NEEDED[family])
    directory = save_tiny_vision_model(tmp_path, family, seed=1)
    one = LLM(str(directory), images=True, device="cpu", memory="16MiB")
    check_same(one, load(group, directory, prefill_chunk=16, page_size=4))
