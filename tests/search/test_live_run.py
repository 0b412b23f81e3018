"""Runs that take flat prompts while they go, against samples that are drawn alone."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fakes import (
    HistoryModel,
    SmallLists,
    fold_hashes,
    make_stop_conditions,
    sample_alone,
    scheduler_of,
)
from live_search import spec_of

from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.common.spec import DeltaSpec
from treegen.engine.param_set import ParamSet, ParamTable
from treegen.errors import CacheFullError, InputError
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.draws import hash_prompt
from treegen.prompts.plan.plan import Request
from treegen.search.live.run import LiveRun

_SHARED = [5, 9, 3, 3, 8, 2, 7, 11, 4, 6, 2, 2]


def run_of(
    model: HistoryModel,
    *,
    num_pages: int = 200,
    sharing: Sharing = "all",
    run_ahead: bool = False,
    max_rows: int = 12,
    prefill_chunk: int = 64,
) -> LiveRun:
    plan = compile_plan([], token_bytes=64, num_layers=1, sharing=sharing)
    scheduler = scheduler_of(
        plan,
        model,
        model.new_cache(num_pages, 4),
        SamplingParams(),
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        run_ahead=run_ahead,
    )
    return LiveRun(
        scheduler,
        spec_of(model),
        make_stop_conditions=lambda params: make_stop_conditions(params, model.vocab_size),
    )


def request_of(tokens: list[int], params: SamplingParams) -> Request:
    rows = 1 if params.temperature == 0 else params.n
    array = np.array(tokens, dtype=np.int32)
    return Request("", array, params.n, rows, params.max_tokens, origin=hash_prompt(array))


def params_of(draw: random.Random) -> SamplingParams:
    max_tokens = draw.choice([1, 2, 5, 9])
    return SamplingParams(
        n=draw.choice([1, 1, 2, 5]),
        temperature=draw.choice([0, 0.8, 1.2]),
        top_k=draw.choice([0, 5]),
        seed=draw.choice([None, None, 1, 7]),
        stop=draw.choice([(), ("cd", "k")]),
        min_tokens=draw.choice([0, min(2, max_tokens)]),
        max_tokens=max_tokens,
        logprobs=draw.choice([0, 0, 3]),
    )


def prompt_of(draw: random.Random) -> list[int]:
    shared = _SHARED[: draw.choice([0, 3, 4, 11, 12])]
    return [*shared, *(draw.randrange(2, 6) for _ in range(draw.choice([1, 2, 3, 9])))]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_between_steps_is_drawn_as_if_alone(seed: int) -> None:
    draw, model = random.Random(seed), HistoryModel()
    run = run_of(
        model,
        num_pages=draw.choice([14, 30, 200]),
        sharing=draw.choice(["all", "auto", "off"]),
        run_ahead=draw.choice([False, True]),
    )
    drawn_before: Counter[tuple[int, ...]] = Counter()
    wanted: dict[int, tuple[list[int], SamplingParams, int]] = {}
    streamed: dict[tuple[int, int], list[int]] = {}
    found: dict[int, list[Any]] = {}
    cancelled: set[int] = set()
    scored: dict[int, list[int]] = {}
    for turn in range(10_000):
        if turn < 25 and draw.random() < 0.5:
            prompts, params = (
                [prompt_of(draw) for _ in range(draw.choice([1, 1, 3]))],
                params_of(draw),
            )
            numbers = run.add([request_of(p, params) for p in prompts], [params] * len(prompts))
            drawn_in_call: Counter[tuple[int, ...]] = Counter()
            for number, prompt in zip(numbers, prompts, strict=True):
                before = drawn_before if params.seed is None else drawn_in_call
                wanted[number] = prompt, params, before[tuple(prompt)]
                before[tuple(prompt)] += params.n
        if turn < 25 and draw.random() < 0.1:
            tokens = [*prompt_of(draw), 3]
            scored[run.score(np.array(tokens, dtype=np.int32))] = tokens
        if draw.random() < 0.08 and (alive := [n for n in wanted if n not in cancelled]):
            number = draw.choice(alive)
            cancelled.add(number)
            run.cancel(number)
        for number, result in run.step():
            assert number not in cancelled
            found.setdefault(number, []).append(result)
        for news in run.take_deltas(wanted):
            assert news.number not in cancelled
            streamed.setdefault((news.number, news.sample), []).extend(news.tokens)
            assert len(news.top) == (len(news.tokens) if wanted[news.number][1].logprobs else 0)
            assert len(news.logprobs) == len(news.tokens)
        run.check()
        if turn >= 25 and not run.has_work:
            break
    for number, (prompt, params, first) in wanted.items():
        results: list[Completion] = sorted(found.get(number, []), key=lambda c: c.sample_index)
        if number not in cancelled:
            assert [c.sample_index for c in results] == list(range(params.n))
        for each in results:
            name = hash_prompt(prompt)
            alone = sample_alone(
                model, prompt, name, first + each.sample_index, params, limit=params.max_tokens
            )
            assert each.tokens == alone
            so_far = streamed.get((number, each.sample_index), [])
            assert tuple(so_far) == each.tokens[: len(so_far)]
            assert len(each.top_logprobs) == (len(each.tokens) if params.logprobs else 0)
    for number, tokens in scored.items():
        (score,) = found[number]
        assert isinstance(score, Score)
        assert score.tokens == tuple(tokens[1:])
        logits = [
            model.logits(tokens[:at]).log_softmax(0)[tokens[at]] for at in range(1, len(tokens))
        ]
        np.testing.assert_allclose(score.logprobs, np.array(logits), atol=1e-5)
    assert run.status().rows == 0
    run.close()
    assert run.scheduler.run.pool.num_used == 0


def test_what_prompts_share_is_computed_once_whatever_their_order() -> None:
    model = HistoryModel()
    run, params = run_of(model), SamplingParams(max_tokens=8)
    for tail in ([2], [3, 4], [2], [5], []):
        run.add([request_of([*_SHARED, *tail], params)], [params])
        run.step()
    while run.has_work:
        run.step()
    # All but the last page of the shared tokens are never computed again.
    assert run.usage.prompt_tokens_computed <= len(_SHARED) + 2 * 4 + 5


@pytest.mark.parametrize("delta", [None, SmallLists(1, 1, 8, 8, 4)])
@pytest.mark.parametrize("prefill_chunk", [1, 5])
def test_a_prompt_that_comes_again_leaves_rows_the_state_that_they_go_on_from(
    delta: DeltaSpec | None, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.model.recurrent.state_batch.fold_update_lists", fold_hashes)
    model = HistoryModel(eos_bias=-20.0, recurrent=True, delta=delta)
    prompt, params = _SHARED[:9], SamplingParams(n=4, max_tokens=9)
    for steps in (3, 10, 12):  # of the first call, before the second one comes
        # Four rows of eight are so many that decode steps take turns with prefill passes.
        run = run_of(model, max_rows=8, prefill_chunk=prefill_chunk, run_ahead=True)
        call = [request_of(prompt, params)], [params]
        run.add(*call)
        found = [result for _ in range(steps) for result in run.step()]
        run.add(*call)
        while run.has_work:
            found += run.step()
            run.check()
        for number, sample in found:
            assert isinstance(sample, Completion)
            index = 4 * number + sample.sample_index
            name = hash_prompt(prompt)
            assert sample.tokens == sample_alone(model, prompt, name, index, params, limit=9)
        assert len(found) == 8
        run.close()


def test_a_prompt_that_cannot_fit_is_refused_alone() -> None:
    run, params = run_of(HistoryModel(), num_pages=8), SamplingParams(max_tokens=4)
    (number,) = run.add([request_of([2, 3], params)], [params])
    long = SamplingParams(max_tokens=300)
    with pytest.raises(CacheFullError, match="the cache holds only"):
        run.add([request_of([2, 3], params), request_of([2, 4], long)], [params, long])
    run.check()
    with pytest.raises(InputError, match="at least two tokens"):
        run.score(np.array([4], dtype=np.int32))
    done = []
    while run.has_work:
        done += run.step()
        run.check()
    assert [n for n, _ in done] == [number]


@pytest.mark.parametrize("shared", range(1, 7))
def test_prompts_of_one_call_leave_each_other_room(shared: int) -> None:
    """The second would split the first, whose parts and row end in one page too many."""
    run, params = run_of(HistoryModel(), num_pages=4, sharing="off"), SamplingParams(max_tokens=3)
    prompts = [_SHARED[:7], [*_SHARED[:shared], 12]]
    numbers = run.add([request_of(prompt, params) for prompt in prompts], [params] * 2)
    done = []
    while run.has_work:
        done += run.step()
        run.check()
    assert sorted(number for number, _ in done) == numbers


def test_parameters_that_nothing_uses_give_up_their_place() -> None:
    @functools.cache
    def set_of(seed: int) -> ParamSet:
        stop = chr(97 + seed % 20) * (1 + seed // 20 % 3)
        params = SamplingParams(seed=seed, stop=stop)
        return ParamSet(params, make_stop_conditions(params))

    table = ParamTable(set_of(0))
    kept: dict[int, int] = {}
    for seed in range(1, 1_200):
        index = table.add(set_of(seed), kept.values)
        if seed % 100 == 0:
            kept[seed] = index
        if seed % 500 == 0:
            kept.pop(seed - 400, None)
        assert table.add(set_of(seed), dict) == index
        params = np.array([index, *kept.values()])
        for token in (0, 7, 23):
            stops = [set_of(each).stopping.may_end[token] for each in (seed, *kept)]
            assert table.may_end(params, np.full(len(params), token)).tolist() == stops
    assert [table[index].params.seed for index in kept.values()] == list(kept)
    assert len(table) < 600
