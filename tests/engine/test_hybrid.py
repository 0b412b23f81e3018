"""Models of which some layers are recurrent: against stock transformers, and against themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import latent_cases
import numpy as np
import pytest
import torch
from engine_cases import generate_greedily, stock_of, tokens_of
from engine_cases import saved as saved
from latent_cases import check_random_prompts, with_room
from tiny_models import HYBRID, known

from treegen import LLM, Node, SamplingParams
from treegen.engine.compute import model_runner
from treegen.errors import CacheFullError, CapacityError
from treegen.model.recurrent.state_batch import fold_lists
from treegen.ops.cache.state_cache import StateCache

TRUNK = "Q: Ann has 3 apples and Bob 14.\nA: The answer is 17.\n\n"
ragged = functools.partial(latent_cases.ragged, trunk=TRUNK)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
# Gated delta rule; convolutions alone; a scan that goes on from a state by single tokens; Mamba2.
SOME = ["qwen3_next", "lfm2", "jamba", "bamba"]

load = functools.partial(latent_cases.shared, memory="8MiB")


# The text parts of models with images have the layers of a family without images.
TEXT_PARTS = {name for name in HYBRID if name.endswith("_on_text")} - {"glm5_next_on_text"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.soak) if name in TEXT_PARTS else name for name in HYBRID],
)
def test_a_ragged_tree_decodes_like_generate(family: str, saved: Callable[[str], Path]) -> None:
    if not known(HYBRID[family][0]):
        pytest.skip(f"this transformers has no {HYBRID[family][0]}")
    path = saved(family)
    llm, stock = load(path, prefill_chunk=11, page_size=4), stock_of(path)
    result = llm.run(ragged(), GREEDY)
    assert result.usage.prompt_tokens_computed == result.plan.stored_tokens
    assert not result.usage.recomputed_tokens
    requests = {request.id: request for request in result.plan.requests}
    assert len(result.completions) == len(requests) == 6
    for c in result.completions:
        ids = requests[c.prompt_id].tokens.tolist()
        tokens, want = generate_greedily(stock, ids, len(c.tokens))
        assert c.tokens == tokens
        assert c.logprobs == pytest.approx(want, abs=1e-4)
    assert len({c.tokens for c in result.completions}) > 3, "the test would see little"


@pytest.mark.parametrize("family", SOME)
def test_samples_are_the_same_whatever_the_budget(
    family: str, saved: Callable[[str], Path]
) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=3, stop=["\n", "Q"])
    llm = load(saved(family))
    want = llm.run(ragged(2), params)
    assert len({c.tokens for c in want.completions}) > 6
    others = [
        LLM(llm.model, tokenizer=llm.tokenizer, memory="8MiB", **options)
        for options in (
            {"max_rows": 1},
            {"max_rows": 7, "prefill_chunk": 5, "page_size": 3, "sharing": "off"},
            {"sharing": "all", "run_ahead": True},
        )
    ]
    # A row that lists updates may need a slot for these and one for the state made of them.
    least = 5 if llm.spec.delta is None else 6
    others += [with_room(llm, pages, states) for pages, states in ((20, least), (34, 40))]
    for other in others:
        got = other.run(ragged(2), params)
        assert len(got.completions) == len(want.completions)
        for a, b in zip(want.completions, got.completions, strict=True):
            assert (a.prompt_id, a.sample_index, a.seed) == (b.prompt_id, b.sample_index, b.seed)
            assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
            # The same recurrence in other steps is rounded otherwise, and goes on with that.
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize(("family", "seed"), list(zip(SOME, range(4), strict=True)))
def test_whatever_runs_together_comes_out_as_if_alone(
    family: str, seed: int, saved: Callable[[str], Path]
) -> None:
    """Scores and samples of random trees, with few pages and states, while rows lose theirs."""
    rng = np.random.default_rng(seed)
    llm = load(saved(family), prefill_chunk=1000)
    small = with_room(llm, int(rng.integers(70, 90)), int(rng.integers(14, 18)))
    small.engine.prefill_chunk = int(rng.integers(3, 30))
    small.engine.max_rows = int(rng.integers(3, 9))
    small.engine.run_ahead = bool(seed % 2)
    alone = LLM(llm.model, tokenizer=llm.tokenizer, memory="8MiB", max_rows=1, sharing="off")
    assert check_random_prompts(small, alone, rng, seed, chance=0.3, limit=1e-3)
    assert small.cache.states is not None
    small.cache.states.check([small.engine.prefix_cache.states()])


@pytest.mark.parametrize(
    ("family", "num_states"), [("qwen3_5", 60), ("qwen3_5", 17), ("olmo_hybrid", 23)]
)
def test_lists_of_updates_draw_what_states_draw(
    family: str, num_states: int, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows fold their lists once and again, with slots to spare or one after another."""
    llm = LLM(str(saved(family)), check=False, device="cpu", memory="8MiB")
    assert llm.spec.delta is not None
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    tree = Node(TRUNK, children=[Node("Q", samples=7), Node("A", samples=1), Node("B", samples=3)])
    parts: list[int] = []

    def counted(cache: StateCache, folds: Sequence[Any]) -> None:
        parts.append(len(folds))
        fold_lists(cache, folds)

    monkeypatch.setattr(model_runner, "fold_lists", counted)
    small = with_room(llm, 200, num_states)
    got = []
    with small.stream(tree, params) as stream:
        while stream.has_work:
            got += stream.step()
            stream.scheduler.check()
    assert sum(each > 0 for each in parts) > 5
    assert (max(parts) > 2) == (num_states < 30)
    llm.model.spec = replace(llm.model.spec, delta=None)
    own = LLM(llm.model, tokenizer=llm.tokenizer, memory="8MiB")
    assert own.cache.states is not None and own.cache.states.delta is None
    assert tokens_of(own.run(tree, params).completions) == tokens_of(got)


def test_a_prompt_of_many_samples_is_computed_once(saved: Callable[[str], Path]) -> None:
    llm = load(saved("qwen3_next"), prefill_chunk=64, max_rows=16)
    ids = (np.arange(200) % 300 + 3).tolist()
    result = llm.run(Node(ids, samples=64, id="p"), SamplingParams(max_tokens=4, ignore_eos=True))
    assert result.usage.prompt_tokens_computed == 200
    assert not result.usage.recomputed_tokens
    assert result.usage.peak_rows == 16


@pytest.mark.parametrize("family", SOME)
def test_scores_are_those_of_transformers(family: str, saved: Callable[[str], Path]) -> None:
    llm, stock = load(saved(family), prefill_chunk=13), stock_of(saved(family))
    pairs = [(TRUNK + "Q: Bob?\nA:", f" {text}") for text in ("The answer is 7.", "no", "8")]
    for (context, text), score in zip(pairs, llm.score(pairs), strict=True):
        ids = llm.tokenizer(context + text)["input_ids"]
        with torch.no_grad():
            logits = stock(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        tail = ids[-len(score.tokens) :]
        want = [float(logits[at - 1, ids[at]]) for at in range(len(ids) - len(tail), len(ids))]
        assert list(score.tokens) == tail
        assert score.logprobs == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("family", SOME)
def test_a_kept_prefix_is_gone_on_from(family: str, saved: Callable[[str], Path]) -> None:
    llm = load(saved(family), page_size=4)
    want = tokens_of(llm.run(ragged(), GREEDY).completions)
    with llm.keep(TRUNK) as kept:
        length = kept.usage.prompt_tokens_computed
        again = llm.run(ragged(), GREEDY)
        assert tokens_of(again.completions) == want
        # Its last token may be another one where a text goes on.
        reused = again.usage.prompt_tokens_reused
        assert length - 1 <= reused <= length
        assert again.usage.prompt_tokens_computed == again.plan.stored_tokens - reused
        # The same prompt once more takes its last token, for the logits.
        whole = llm.run(Node(TRUNK, samples=2), GREEDY)
        assert whole.usage.prompt_tokens_computed == 1
        # No state was kept within it, so what parts from it there is computed anew, and is right.
        inside = llm.generate([TRUNK[:20], TRUNK[:20] + "?"], GREEDY)
    assert llm.cache.states is not None
    assert not llm.list_prefixes() and llm.cache.states.num_free == llm.engine.num_states
    fresh = load(saved(family)).generate([TRUNK[:20], TRUNK[:20] + "?"], GREEDY)
    assert [c.tokens for each in inside for c in each] == [c.tokens for each in fresh for c in each]


def test_prefixes_that_are_kept_have_half_of_the_states(saved: Callable[[str], Path]) -> None:
    llm = with_room(load(saved("lfm2")), 100, 10)
    for number in range(4):
        llm.keep(f"{number} {TRUNK}", name=f"p{number}")
    assert [name for name, _ in llm.list_prefixes()] == ["p2", "p3"]
    assert llm.cache.states is not None and llm.cache.states.num_free == 6
    many = Node("", children=[Node(f"{i} {TRUNK}") for i in range(6)], samples=0)
    with pytest.raises(CapacityError, match="24 recurrent states"):
        llm.keep(many)


def test_what_does_not_fit_is_said_at_once(saved: Callable[[str], Path]) -> None:
    llm = with_room(load(saved("lfm2")), 100, 3)
    with pytest.raises(
        CapacityError, match=r"needs 5 recurrent states of .* but the cache holds only"
    ):
        llm.run(ragged(), GREEDY)
    with llm.session(GREEDY) as session, pytest.raises(CacheFullError, match="4 recurrent states"):
        session.sample({session.root(TRUNK): 1})
    with pytest.raises(CacheFullError, match="recurrent states of"):
        load(saved("qwen3_next"), memory=4000)


def test_a_search_keeps_the_state_before_the_last_token(saved: Callable[[str], Path]) -> None:
    """To sample from a node again computes one token, as on any other model."""
    llm = load(saved("qwen3_next"))
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    with llm.session(params) as session:
        root = session.root(TRUNK)
        children = session.sample({root: 3})[root]
        session.sample(dict.fromkeys(children, 2))
        session.sample({root: 2})
        assert root.search.usage.tokens_prefilled == root.num_context_tokens + 3 + 1
