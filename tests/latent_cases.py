"""Models with latent attention: the families, and in which form their latents are read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import tokens_of

from treegen import LLM, Completion, Node, SamplingParams
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.model.memory import new_state_cache
from treegen.ops.attention import latent as latents
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.plan.cost_model import CostModel
from treegen.prompts.plan.requests import build_sample_requests

FAMILIES = [
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "youtu",
]
TRUNK = "Q: Ann has 3 apples and Bob 14.\nA: The answer is 17.\n\n" * 2
FORMS: dict[str, Callable[..., bool] | None] = {
    "absorbed": lambda *_: False,
    "expanded": lambda *_: True,
    "chosen": None,
}


def force(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read latents in a form, in passes of many rows too."""
    choose = FORMS[form]
    if choose is not None:
        monkeypatch.setattr(CostModel, "should_expand", choose)
        least = 1 if form == "expanded" else float("inf")
        monkeypatch.setattr(latents, "rows_to_expand", lambda _: least)
    monkeypatch.setattr(latents, "_PIECE", 72 * 24)  # 24 tokens of these models


def load(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"check": False, "device": "cpu", "memory": "2MiB", **options})


_load_once = functools.cache(load)


def shared(path: Path, **options: Any) -> LLM:
    """An LLM of a model that tests share."""
    llm = _load_once(path)
    return LLM(llm.model, tokenizer=llm.tokenizer, **{"memory": "2MiB", **options})


def ragged(samples: int = 1, trunk: str = TRUNK) -> Node:
    """Two levels, nodes of one token, nodes with an only child, samples of inner nodes."""
    return Node(
        trunk,
        children=[
            Node(
                "Q: Bob has 14 pens.",
                children=[
                    Node(" How many?\nA:", samples=samples, id="a"),
                    Node("\n", samples=samples, id="b"),
                    Node(" 5", children=[Node(" or 6", samples=samples, id="c")], samples=0),
                ],
                samples=samples,
                id="inner",
            ),
            Node("Q", children=[Node("?", samples=samples, id="d")], samples=0),
            Node("X", samples=samples, id="e"),
        ],
        samples=0,
    )


def with_room(llm: LLM, num_pages: int, num_states: int, **options: Any) -> LLM:
    """The same model, with room for so many pages of 4 tokens and so many states."""
    llm = LLM(llm.model, tokenizer=llm.tokenizer, memory="1MiB", page_size=4, **options)
    states = None
    if llm.spec.states:
        states = new_state_cache(llm.model, num_states, num_windows=llm.max_rows)
    layers = llm.model.new_cache(num_pages + 1, 4)
    llm.engine.cache = PagedCache(layers, num_pages, 4, states)
    llm.engine.prefix_cache = PrefixCache(llm.cache, num_pages // 2)
    return llm


def small(llm: LLM, seed: int, **options: Any) -> LLM:
    """The same model with pages for a few rows at a time."""
    rng = np.random.default_rng(seed)
    given = {
        "memory": int(rng.integers(75, 100)) * 4 * llm.spec.kv_bytes_per_token,
        "page_size": 4,
        "max_rows": int(rng.integers(3, 9)),
        "sharing": "all",
        "prefill_chunk": int(rng.integers(5, 40)),
        "run_ahead": bool(seed % 2),
        **options,
    }
    if llm.spec.states:
        given["memory"] += 60 * llm.spec.state_bytes
    return LLM(llm.model, tokenizer=llm.tokenizer, **given)


def check_random_prompts(
    few: LLM, alone: LLM, rng: np.random.Generator, seed: int, *, chance: float, limit: float
) -> int:
    """Samples and scores of random prompts are those of each prompt alone.

    chance: how often a row loses its pages after a step. limit: of differences between scores.

    Returns how often rows were preempted; 0 if none had pages that it could lose.
    """
    trunk = rng.integers(3, 320, 40).tolist()
    prompts = [
        trunk[: rng.integers(0, 40)] + rng.integers(3, 320, rng.integers(1, 9)).tolist()
        for _ in range(8)
    ]
    few.keep(few.tokenizer.decode(trunk[:10]))
    params = [
        SamplingParams(n=int(rng.integers(1, 5)), seed=seed, max_tokens=int(rng.integers(1, 15)))
        for _ in prompts
    ]
    leaves = [
        Node(ids, samples=each.n, id=str(i))
        for i, (ids, each) in enumerate(zip(prompts, params, strict=True))
    ]
    tree = Node("", children=leaves, samples=0)
    requests = build_sample_requests(tree, few.tokenizer, params, few.spec)
    wanted = [range(request.samples) for request in requests]
    preempted = 0
    with few._start(few._plan(requests), params, wanted) as stream:
        scheduler, got = stream.scheduler, list[Completion]()
        while stream.has_work:
            got += stream.step()
            if rng.random() < chance:
                scheduler._collect_results()
                preempted += scheduler._admission.reclaim_pages()
            scheduler.check()
    assert len(got) == sum(len(each) for each in wanted)
    for index, (request, each) in enumerate(zip(requests, params, strict=True)):
        with alone._start(alone._plan([request]), [each], [wanted[index]]) as one:
            tokens = tokens_of(one)
        assert tokens == tokens_of(c for c in got if c.prompt_id == str(index))
    pairs = [(ids[:-1], ids[-1:]) if len(ids) > 1 else (ids, [5]) for ids in prompts]
    for score, pair in zip(few.score(pairs), pairs, strict=True):
        assert score.logprobs == pytest.approx(alone.score([pair])[0].logprobs, abs=limit)
    return preempted and stream.usage.preemptions
