"""The most likely tokens in the places of given ones, compared with transformers' own."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from treegen import LLM, AsyncLLM, Node, SamplingParams
from treegen.common.outputs import Score
from treegen.engine.segments import scores as scores_of_segments
from treegen.errors import InputError

VOCABULARY = 2_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def save(path: Path, family: str) -> Path:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    return tiny_models.save_tiny_model(path, family, **settings)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return load(checkpoint)


def load(path: Path, **options: Any) -> LLM:
    usual = {"check": False, "device": "cpu", "dtype": "float32", "memory": "16MiB"}
    return LLM(str(path), **{**usual, **options})


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Any:
    return load_stock(checkpoint)


def load_stock(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def check(
    stock: Any, tokens: list[int], start: int, score: Score | None, top: int, atol: float = 1e-5
) -> None:
    """Compare a score of the tokens from `start` on with transformers, by the worst number."""
    assert score is not None and score.tokens == tuple(tokens[start:])
    with torch.inference_mode():
        logits = stock(input_ids=torch.tensor([tokens])).logits[0, start - 1 : -1]
    want = logits.double().log_softmax(-1).numpy()
    own = want[np.arange(len(want)), tokens[start:]]
    np.testing.assert_allclose(score.logprobs, own, atol=atol, rtol=0)
    if not top:
        assert score.top is None
        return
    assert score.top is not None
    top = min(top, want.shape[1])
    assert score.top.tokens.shape == score.top.logprobs.shape == (len(want), top)
    assert score.top.tokens.dtype == np.int32 and score.top.logprobs.dtype == np.float32
    best = -np.sort(-want, axis=1)[:, :top]
    np.testing.assert_allclose(score.top.logprobs, best, atol=atol, rtol=0)
    # Each is the log-probability of the very token that it is given with, and no token comes twice.
    named = np.take_along_axis(want, score.top.tokens.astype(np.int64), axis=1)
    np.testing.assert_allclose(score.top.logprobs, named, atol=atol, rtol=0)
    assert all(len(set(row)) == top for row in score.top.tokens.tolist())
    assert (np.diff(score.top.logprobs, axis=1) <= 0).all()
    assert score.top.pairs()[0][0] == (score.top.tokens[0, 0], score.top.logprobs[0, 0])


def random_pairs(seed: int, num: int) -> list[tuple[list[int], list[int]]]:
    """Contexts that share a trunk, that go on from each other, and that are all alone."""
    rng = np.random.default_rng(seed)

    def ids(size: Any) -> list[int]:
        found: list[int] = rng.integers(2, VOCABULARY, size).tolist()
        return found

    trunk, pairs = ids(70), [(ids(1), ids(1))]
    for _ in range(num):
        context = trunk[: rng.integers(1, 71)] + ids(rng.integers(0, 20))
        pairs.append((context, ids(rng.integers(1, 40))))
        if rng.random() < 0.3:
            pairs.append((context + pairs[-1][1], ids(3)))
        if rng.random() < 0.2:
            pairs.append((context, pairs[-1][1]))
    return pairs


@pytest.mark.parametrize("top", [0, 1, 20, 1_024, 5_000])
def test_they_are_those_of_transformers(llm: LLM, stock: Any, top: int) -> None:
    pairs = random_pairs(top, 3 if top > 1_000 else 8)
    scores = llm.score(pairs, top=top)
    for (context, rest), score in zip(pairs, scores, strict=True):
        check(stock, context + rest, len(context), score, top)


@pytest.mark.parametrize("top", [1, 256, 1_024])
def test_they_are_those_of_a_large_vocabulary(tmp_path: Path, top: int) -> None:
    """Most of which is left out before the most likely tokens are chosen."""
    path = tiny_models.save_tiny_model(tmp_path, "llama", vocab_size=50_257)
    stock, pairs = load_stock(path), random_pairs(top, 3)
    for (context, rest), score in zip(pairs, load(path).score(pairs, top=top), strict=True):
        check(stock, context + rest, len(context), score, top)


def test_they_are_those_of_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3_next")
    stock, pairs = load_stock(path), random_pairs(2, 5)
    for (context, rest), score in zip(pairs, load(path).score(pairs, top=20), strict=True):
        # Its layers sum in other pieces than transformers' do.
        check(stock, context + rest, len(context), score, 20, atol=1e-3)


def test_a_short_text_below_a_long_prompt_holds_its_own_numbers_alone(llm: LLM) -> None:
    rng = np.random.default_rng(0)
    pairs = [rng.integers(2, VOCABULARY, 403).tolist() for _ in range(20)]
    tracemalloc.start()
    scores = llm.score([(each[:400], each[400:]) for each in pairs], top=1_024)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    needed = sum(each.top.tokens.nbytes * 2 for each in scores if each.top is not None)
    assert needed == 20 * 3 * 1_024 * 8 and held < 3 * needed


def test_small_passes_and_a_small_cache_change_nothing(checkpoint: Path, stock: Any) -> None:
    llm = load(checkpoint, prefill_chunk=7, memory="1MiB", page_size=4)
    pairs = random_pairs(3, 8)
    for (context, rest), score in zip(pairs, llm.score(pairs, top=9), strict=True):
        check(stock, context + rest, len(context), score, 9)


def test_completions_have_those_of_their_prompts(llm: LLM, stock: Any) -> None:
    prompts = [context for context, _ in random_pairs(5, 6)]
    params = [
        SamplingParams(n=i % 3 + 1, max_tokens=i + 1, temperature=i % 2, prompt_logprobs=each)
        for i, each in enumerate([None, 0, 7, 3] * 5)
    ][: len(prompts)]
    found = llm.generate(prompts, params)
    for prompt, own, completions in zip(prompts, params, found, strict=True):
        for completion in completions:
            if own.prompt_logprobs is None or len(prompt) < 2:
                assert completion.prompt_logprobs is None
            else:
                check(stock, prompt, 1, completion.prompt_logprobs, own.prompt_logprobs)


def test_chunks_of_logits_change_nothing(
    llm: LLM, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and numbers of most likely tokens are mixed within a chunk of three rows."""
    monkeypatch.setattr(scores_of_segments, "_CHUNK", 3 * VOCABULARY)
    pairs = random_pairs(7, 8)
    for (context, rest), score in zip(pairs, llm.score(pairs, top=5), strict=True):
        check(stock, context + rest, len(context), score, 5)
    test_completions_have_those_of_their_prompts(llm, stock)


def test_samples_are_the_same_with_them(checkpoint: Path) -> None:
    prompts = [context for context, _ in random_pairs(6, 5)]
    params = SamplingParams(n=3, max_tokens=9, seed=1)
    llm = load(checkpoint, memory="1MiB", page_size=4, prefill_chunk=16)
    plain = llm.generate(prompts, params)
    completions = llm.generate(prompts, replace(params, prompt_logprobs=2))
    assert [[c.tokens for c in each] for each in completions] == [
        [c.tokens for c in each] for each in plain
    ]
    tree = Node(prompts[1], samples=2)
    one, other = llm.run(tree, SamplingParams(prompt_logprobs=2, max_tokens=3)).completions
    assert one.prompt_logprobs is other.prompt_logprobs is not None


def test_many_callers_at_once_get_them(checkpoint: Path, stock: Any) -> None:
    pairs = random_pairs(8, 8)

    async def main() -> tuple[list[Any], list[Any]]:
        with AsyncLLM(load(checkpoint)) as served:
            wholes = [context + rest for context, rest in pairs]
            scored = [served.score([whole], top=5) for whole in wholes]
            drawn = [
                served.generate([whole], SamplingParams(max_tokens=3, prompt_logprobs=4))
                for whole in wholes
            ]
            plain = [served.generate([whole], SamplingParams(max_tokens=3)) for whole in wholes]
            found = await asyncio.gather(*plain, *scored, *drawn)
            served.check()
        return found[len(plain) : 2 * len(plain)], found[2 * len(plain) :]

    scored, drawn = asyncio.run(main())
    for (context, rest), (score,), (_, ((completion,),)) in zip(pairs, scored, drawn, strict=True):
        check(stock, context + rest, 1, score, 5)
        check(stock, context + rest, 1, completion.prompt_logprobs, 4)


def test_a_number_that_is_none_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="top must be at least 0, got -1"):
        llm.score([([5], [6])], top=-1)
    with pytest.raises(InputError, match="prompt_logprobs must be an integer, got True"):
        SamplingParams(prompt_logprobs=True)
