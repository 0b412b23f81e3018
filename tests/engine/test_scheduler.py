"""The scheduler on a model that sees exactly what its pages hold."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fakes import (
    EOS,
    HistoryModel,
    drain,
    expected,
    keep_prefix,
    sample_alone,
    scheduler_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.engine.passes import pass_inputs as passes
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.errors import CacheFullError, CapacityError, InternalError, NumericsError
from treegen.model.batch import Batch
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import SHARING, Sharing
from treegen.prompts.plan.plan import Plan, Request


def request(
    name: str, tokens: list[int], samples: int, params: SamplingParams, room: int = 10_000
) -> Request:
    rows = min(samples, 1) if params.temperature == 0 else samples
    return Request(name, np.array(tokens, np.int32), samples, rows, min(params.max_tokens, room))


def plan_of(
    prompts: list[tuple[list[int], int]], params: SamplingParams, sharing: str = "auto"
) -> Plan:
    requests = [request(f"p{i}", tokens, n, params) for i, (tokens, n) in enumerate(prompts)]
    return compile_plan(requests, token_bytes=64, num_layers=1, sharing=sharing)  # type: ignore[arg-type]


def tokens_of(completions: list[Completion]) -> dict[tuple[str, int], tuple[int, ...]]:
    result = {(c.prompt_id, c.sample_index): c.tokens for c in completions}
    assert len(result) == len(completions), "a sample was returned twice"
    return result


def smallest_pool(plan: Plan, page_size: int) -> int:
    return max(plan.get_single_row_pages(i, page_size) for i in range(len(plan.requests)))


prompt_lists = st.lists(
    st.tuples(st.lists(st.integers(2, 4), min_size=1, max_size=14), st.integers(0, 5)),
    min_size=1,
    max_size=9,
)

# All prefixes of a text from some length on: so many levels that segments repeat tokens.
chains = st.builds(
    lambda tokens, first: [(tokens[:length], 1) for length in range(first, len(tokens) + 1)],
    st.lists(st.integers(2, 4), min_size=13, max_size=20),
    st.integers(1, 4),
)


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.one_of(prompt_lists, chains),
    sharing=st.sampled_from(SHARING),
    page_size=st.integers(1, 5),
    extra_pages=st.integers(0, 12),
    max_rows=st.integers(1, 20),
    prefill_chunk=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 1.0]),
    eos_bias=st.sampled_from([-20.0, 0.0, 2.5]),
    max_tokens=st.integers(1, 12),
    run_ahead=st.booleans(),
)
def test_samples_do_not_depend_on_how_they_are_scheduled(
    prompts: list[tuple[list[int], int]],
    sharing: str,
    page_size: int,
    extra_pages: int,
    max_rows: int,
    prefill_chunk: int,
    temperature: float,
    eos_bias: float,
    max_tokens: int,
    run_ahead: bool,
) -> None:
    """Any tree, any budget: what one sample alone would be, and every page accounted for."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5)
    plan = plan_of(prompts, params, sharing)
    model = HistoryModel(eos_bias=eos_bias)
    cache = model.new_cache(smallest_pool(plan, page_size) + extra_pages, page_size)
    scheduler = scheduler_of(
        plan,
        model,
        cache,
        params,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        run_ahead=run_ahead,
    )
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    cache.pool.check([])
    assert cache.pool.num_used == 0


@pytest.mark.parametrize("sharing", SHARING)
def test_every_shared_token_is_computed_once(sharing: str) -> None:
    params = SamplingParams(max_tokens=6)
    few_shot = [2, 3, 4] * 20
    prompts = [([*few_shot, 5 + i, 6, 7 + i], 4) for i in range(10)]
    plan = plan_of(prompts, params, sharing)
    model = HistoryModel(eos_bias=-20.0)
    scheduler = scheduler_of(plan, model, model.new_cache(400, 4), params, max_rows=8)
    assert len(drain(scheduler)) == 40
    assert scheduler.usage.prompt_tokens_computed == plan.stored_tokens == 60 + 10 * 3
    assert scheduler.usage.recomputed_tokens == 0
    assert scheduler.usage.decoded_tokens == 40 * 6
    # The first token of a sample comes from the prompt's pass, the last is never an input.
    assert model.tokens_computed == plan.stored_tokens + 40 * 5
    assert scheduler.usage.prompt_tokens_unshared == 40 * 63


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("sharing", SHARING)
def test_a_long_prompt_is_computed_in_several_passes(
    sharing: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second pass on, keys of earlier ones are a level of their own."""
    monkeypatch.setattr(passes, "_MIN_LEVEL_KEYS", 6)
    params = SamplingParams(max_tokens=3)
    long = [2, 3, 4, 5, 6] * 9
    plan = plan_of([([*long, 7, *long[:20]], 3), ([*long, 8], 2), (long[:7], 1)], params, sharing)
    model = HistoryModel()
    num_levels: list[int] = []

    def watched(batch: Batch) -> Tensor:
        num_levels.append(len(batch.levels.levels))
        return HistoryModel.forward(model, batch)

    monkeypatch.setattr(model, "forward", watched)
    cache = model.new_cache(smallest_pool(plan, page_size) + 20, page_size)
    scheduler = scheduler_of(plan, model, cache, params, prefill_chunk=10)
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    assert max(num_levels) > 1


def test_pages_follow_live_tokens() -> None:
    """Over 169 problems memory stays at what the live ones need, and ends at nothing."""
    params = SamplingParams(max_tokens=8)
    prompts = [([2, 3, 4] * 2 + [5 + i % 13, 5 + i // 13], 3) for i in range(13 * 13)]
    plan = plan_of(prompts, params)
    model = HistoryModel()
    cache = model.new_cache(100_000, 4)
    scheduler = scheduler_of(plan, model, cache, params, max_rows=12)
    assert len(drain(scheduler, check=False)) == 3 * 13 * 13
    assert scheduler.usage.peak_pages < 200
    assert len(scheduler.run.rows.request) <= 64
    assert cache.pool.num_used == 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_rows_are_preempted_and_come_back_the_same(run_ahead: bool) -> None:
    """Short samples teach the scheduler to hope for more than fits; long ones then collide."""
    params = SamplingParams(max_tokens=60, seed=11)
    prompts = [([2, 3, 4 + i], 6) for i in range(12)]
    plan = plan_of(prompts, params)
    model = HistoryModel(eos_bias=1.0)
    cache = model.new_cache(smallest_pool(plan, 2) + 12, 2)
    scheduler = scheduler_of(plan, model, cache, params, run_ahead=run_ahead)
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    assert scheduler.usage.preemptions > 0
    assert scheduler.usage.recomputed_tokens > 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_lost_row_is_told_and_does_not_hang_the_run(run_ahead: bool) -> None:
    params = SamplingParams(max_tokens=4)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], 4), ([2, 4], 2)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(50, 4), params, max_rows=4, run_ahead=run_ahead
    )
    while len(scheduler.queue.ready) < 2:
        scheduler.step()
    scheduler.queue.ready = scheduler.queue.ready[:-1]
    with pytest.raises(AssertionError, match="a row is in no queue"):
        scheduler.check()
    finished: list[Completion] = []
    with pytest.raises(InternalError, match=r"cannot continue with prompts 'p1'; .* please report"):
        while True:
            finished += scheduler.step()
    assert len(finished) == 5
    assert tokens_of(finished).items() <= expected(model, plan, params).items()


def test_greedy_samples_are_one_decode() -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], 7)], params)
    scheduler = scheduler_of(plan, model, model.new_cache(50, 4), params)
    completions = drain(scheduler)
    assert [c.sample_index for c in completions] == list(range(7))
    assert len({c.tokens for c in completions}) == 1
    assert scheduler.usage.decoded_tokens == 5


def test_equal_prompts_share_everything_but_their_samples() -> None:
    params = SamplingParams(max_tokens=4, seed=2)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3, 4, 5], 3), ([2, 3, 4, 5], 3)], params)
    scheduler = scheduler_of(plan, model, model.new_cache(50, 4), params, max_rows=2)
    result = tokens_of(drain(scheduler))
    assert scheduler.usage.prompt_tokens_computed == 4
    assert result == expected(model, plan, params)
    assert len(set(result.values())) == 6, "different prompts draw different samples"


@settings(max_examples=20, deadline=None)
@given(
    prompts=prompt_lists,
    data=st.data(),
    max_rows=st.integers(1, 8),
    extra=st.integers(0, 9),
    run_ahead=st.booleans(),
)
def test_cancelled_samples_go_and_the_others_stay_the_same(
    prompts: list[tuple[list[int], int]],
    data: st.DataObject,
    max_rows: int,
    extra: int,
    run_ahead: bool,
) -> None:
    params = SamplingParams(max_tokens=8, seed=1)
    plan = plan_of(prompts, params)
    model = HistoryModel()
    cache = model.new_cache(smallest_pool(plan, 2) + extra, 2)
    scheduler = scheduler_of(plan, model, cache, params, max_rows=max_rows, run_ahead=run_ahead)
    cancelled: set[tuple[str, int]] = set()
    finished: list[Completion] = []
    while scheduler.has_work:
        if data.draw(st.booleans()):
            index = data.draw(st.integers(0, len(prompts) - 1))
            sample = data.draw(st.none() | st.integers(0, 4))
            scheduler.cancel(index, sample)
            scheduler.check()
            chosen = range(prompts[index][1]) if sample is None else [sample]
            cancelled |= {(f"p{index}", i) for i in chosen}
        finished += scheduler.step()
        scheduler.check()
    result, want = tokens_of(finished), expected(model, plan, params)
    assert result.items() <= want.items()
    assert want.keys() - result.keys() <= cancelled
    assert cache.pool.num_used == 0


@settings(max_examples=50, deadline=None)
@given(
    prompts=prompt_lists,
    scored=st.lists(
        st.tuples(st.lists(st.integers(2, 4), min_size=2, max_size=12), st.integers(1, 11)),
        max_size=4,
    ),
    prefixes=st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=12), max_size=3),
    sharing=st.sampled_from(SHARING),
    page_size=st.integers(1, 4),
    extra_pages=st.integers(0, 12),
    max_rows=st.integers(1, 8),
    prefill_chunk=st.integers(1, 12),
    skip=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=6),
    run_ahead=st.booleans(),
)
def test_kept_prefixes_and_scores_change_nothing(
    prompts: list[tuple[list[int], int]],
    scored: list[tuple[list[int], int]],
    prefixes: list[list[int]],
    sharing: Sharing,
    page_size: int,
    extra_pages: int,
    max_rows: int,
    prefill_chunk: int,
    skip: set[tuple[int, int]],
    run_ahead: bool,
) -> None:
    """Samples and log-likelihoods beside prefixes that cover any part of the tree."""
    params = SamplingParams(max_tokens=6, seed=3)
    requests = [request(f"p{i}", tokens, n, params) for i, (tokens, n) in enumerate(prompts)]
    for index, (tokens, start) in enumerate(scored):
        array = np.array(tokens, np.int32)
        start = min(start, len(tokens) - 1)
        requests.append(Request(f"s{index}", array, 0, 0, max_tokens=1, score_from=start))
    plan = compile_plan(
        requests,
        token_bytes=64,
        num_layers=1,
        sharing=sharing,
        split_at=[np.array(tokens, np.int32) for tokens in prefixes],
    )
    model = HistoryModel()
    kept_pages = sum(-(-len(tokens) // page_size) + 1 for tokens in prefixes)
    pool = max(smallest_pool(plan, page_size), 2 * kept_pages) + extra_pages
    cache = model.new_cache(pool, page_size)
    kept = PrefixCache(cache, kept_pages)
    for index, tokens in enumerate(prefixes):
        keep_prefix(f"k{index % 2}", tokens, model, cache, kept)
    wanted = [
        [i for i in range(r.samples) if (place, i) not in skip]
        for place, r in enumerate(plan.requests)
    ]
    scheduler = scheduler_of(
        plan,
        model,
        cache,
        params,
        kept=kept,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        samples=wanted,
        run_ahead=run_ahead,
    )
    result = tokens_of(drain(scheduler))
    want = expected(model, plan, params)
    names = {(r.id, i) for r, indices in zip(plan.requests, wanted, strict=True) for i in indices}
    assert result == {name: want[name] for name in names}
    for place, spec in enumerate(plan.requests):
        if spec.score_from is not None:
            tokens = spec.tokens.tolist()
            logprobs = [
                float(model.logits(tokens[:at]).log_softmax(-1)[tokens[at]])
                for at in range(spec.score_from, len(tokens))
            ]
            assert scheduler.scores[place].logprobs == pytest.approx(logprobs, abs=1e-5)
    usage = scheduler.usage
    assert usage.prompt_tokens_computed + usage.prompt_tokens_reused <= plan.stored_tokens
    scheduler.close()
    cache.pool.check(kept.tables())


def test_a_cancelled_prompt_frees_its_pages_at_once() -> None:
    params = SamplingParams(max_tokens=50)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2] * 40, 4), ([3] * 40, 4)], params)
    cache = model.new_cache(200, 4)
    scheduler = scheduler_of(plan, model, cache, params)
    for _ in range(4):
        scheduler.step()
    before = cache.pool.num_used
    scheduler.cancel(0)
    assert cache.pool.num_used <= before - 10 - 4
    assert {c.prompt_id for c in drain(scheduler)} == {"p1"}


@pytest.mark.parametrize("length", [1, 2])
def test_waiting_prompts_are_cancelled_in_linear_time(length: int) -> None:
    """Prompts of one token are all equal here, and those of two tokens are distinct."""
    params, model = SamplingParams(max_tokens=1), HistoryModel()

    def cancel_all(num_prompts: int) -> float:
        plan = plan_of([([2, 3 + i][:length], 1) for i in range(num_prompts)], params)
        scheduler = scheduler_of(plan, model, model.new_cache(200, 4), params)
        start = time.process_time()
        for index in reversed(range(num_prompts)):
            scheduler.cancel(index)
        seconds = time.process_time() - start
        assert not scheduler.has_work
        return seconds

    assert cancel_all(20_000) < 50 * cancel_all(1_000)


def test_wanted_samples_only() -> None:
    """As on resume: some samples exist already, one prompt is finished."""
    params = SamplingParams(max_tokens=5, seed=9)
    model = HistoryModel()
    plan = plan_of([([2, 3], 4), ([2, 4], 3), ([2, 5], 2)], params)
    cache = model.new_cache(60, 2)
    scheduler = scheduler_of(plan, model, cache, params, samples=[[1, 3], [], [0]])
    result = tokens_of(drain(scheduler))
    want = expected(model, plan, params)
    assert result == {key: want[key] for key in [("p0", 1), ("p0", 3), ("p2", 0)]}
    assert cache.pool.num_used == 0


def test_a_closed_scheduler_frees_everything() -> None:
    params = SamplingParams(max_tokens=50)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3, 4], 4), ([2, 3], 4)], params)
    cache = model.new_cache(200, 2)
    scheduler = scheduler_of(plan, model, cache, params, max_rows=5)
    for _ in range(5):
        scheduler.step()
    assert cache.pool.num_used
    scheduler.close()
    assert not cache.pool.num_used
    cache.pool.check([])


def test_context_limit_ends_a_sample() -> None:
    params = SamplingParams(max_tokens=50)
    plan = compile_plan([request("p", [2] * 10, 2, params, room=3)], token_bytes=64, num_layers=1)
    model = HistoryModel(eos_bias=-20.0)
    completions = drain(scheduler_of(plan, model, model.new_cache(50, 4), params))
    assert [(c.num_tokens, c.finish_reason) for c in completions] == [(3, "length")] * 2


def test_stop_strings_span_tokens_and_are_cut() -> None:
    """A stop of two letters: text ends before it, tokens keep it."""
    params = SamplingParams(max_tokens=200, stop=["ce", "dd"], ignore_eos=True, seed=4)
    model = HistoryModel(vocab_size=6)
    plan = plan_of([([2, 3], 40)], params)
    scheduler = scheduler_of(plan, model, model.new_cache(8000, 4), params)
    completions = drain(scheduler)
    assert {c.stop for c in completions} >= {"ce", "dd"}
    for c in completions:
        whole = "".join(chr(97 + t) for t in c.tokens if t != EOS)
        if c.finish_reason == "stop":
            assert isinstance(c.stop, str)
            assert whole == c.text + c.stop
            assert "ce" not in c.text and "dd" not in c.text
        else:
            assert c.num_tokens == 200


def test_stop_token_ids_end_a_sample_without_their_text() -> None:
    params = SamplingParams(max_tokens=100, stop_token_ids=[4], seed=4)
    model = HistoryModel(vocab_size=8)
    plan = plan_of([([2, 3], 20)], params)
    completions = drain(scheduler_of(plan, model, model.new_cache(4000, 4), params))
    assert {c.stop for c in completions} == {4, EOS}
    for c in completions:
        assert c.tokens[-1] == c.stop
        assert c.text == letters(c.tokens[:-1])


def letters(tokens: tuple[int, ...]) -> str:
    return "".join(chr(97 + t) for t in tokens if t != EOS)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_logits_that_are_not_numbers_name_the_row(run_ahead: bool) -> None:
    params = SamplingParams(max_tokens=50)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3, 4], 4)], params)
    scheduler = scheduler_of(plan, model, model.new_cache(200, 2), params, run_ahead=run_ahead)
    model.bad_at = 3
    with pytest.raises(NumericsError, match=r"prompt 'p0' sample 3 token 3"):
        drain(scheduler)
    model.bad_at = 0
    with pytest.raises(NumericsError, match=r"prompt 'p0' at token 2"):
        drain(scheduler_of(plan, model, model.new_cache(200, 2), params, run_ahead=run_ahead))


@pytest.mark.parametrize("bad", range(4))
def test_of_prompts_that_one_pass_computes_the_bad_one_is_named(bad: int) -> None:
    params, prompts = SamplingParams(max_tokens=5), [[2, 3, 4 + i] for i in range(4)]

    class OneBad(HistoryModel):
        def logits(self, tokens: Sequence[int]) -> torch.Tensor:
            found = super().logits(tokens)
            return found * torch.nan if list(tokens) == prompts[bad] else found

    model = OneBad()
    plan = plan_of(list(zip(prompts, (3, 1, 3, 2), strict=True)), params)
    scheduler = scheduler_of(plan, model, model.new_cache(200, 2), params)
    with pytest.raises(NumericsError, match=f"prompt 'p{bad}' at token 2"):
        drain(scheduler)
    assert scheduler.usage.prefill_steps == 2  # the tokens that they share, and all of them


@pytest.mark.parametrize("run_ahead", [False, True])
def test_scores_that_are_cancelled_leave_equal_ones_alone(run_ahead: bool) -> None:
    """What they share may be in a pass under way, whose scores are not noted yet."""
    tokens = np.array([2, 3, 4, 2, 3, 4], np.int32)
    requests = [Request(f"s{i}", tokens, 0, 0, 1, score_from=2) for i in range(3)]
    plan = compile_plan(requests, token_bytes=64, num_layers=1)
    model = HistoryModel()
    scheduler = scheduler_of(
        plan,
        model,
        model.new_cache(50, 2),
        SamplingParams(),
        max_rows=1,
        samples=[[], [], []],
        run_ahead=run_ahead,
    )
    scheduler.step()
    for index, request in list(scheduler.run.requests.items()):
        if request.opened is not None:
            scheduler.cancel(index)
    drain(scheduler)
    assert 2 in scheduler.scores


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_pass_that_fails_while_a_score_is_cancelled_fails_the_next_step(has_failed: bool) -> None:
    """The caller of `cancel` does not expect the error of a pass, and the run must not go on."""
    tokens = np.array([2, 3, 4], np.int32)
    requests = [Request("s", tokens, 0, 0, 1, score_from=1), Request("p", tokens, 1, 1, 4)]
    plan = compile_plan(requests, token_bytes=64, num_layers=1)
    model = HistoryModel()
    model.bad_at = 0
    scheduler = scheduler_of(
        plan,
        model,
        model.new_cache(50, 2),
        SamplingParams(max_tokens=4),
        samples=[[], [0]],
        run_ahead=True,
    )
    scheduler.step()
    if has_failed:
        scheduler._keep_error(InternalError("an earlier error"))
    scheduler.cancel(0)
    assert 0 not in scheduler.run.requests
    expected = (InternalError, "an earlier error") if has_failed else (NumericsError, "at token 2")
    with pytest.raises(expected[0], match=expected[1]):
        drain(scheduler)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_score_whose_last_piece_is_bad_is_not_given(run_ahead: bool) -> None:
    """Nor is it while the pass with that piece is under way behind the one before."""
    spec = Request("s", np.array([2, 3, 4, 5, 6, 7], np.int32), 0, 0, max_tokens=1, score_from=1)
    plan = compile_plan([spec], token_bytes=64, num_layers=1)
    model = HistoryModel()
    scheduler = scheduler_of(
        plan, model, model.new_cache(20, 2), SamplingParams(), prefill_chunk=3, run_ahead=run_ahead
    )
    model.bad_at = 1
    with pytest.raises(NumericsError, match="prompt 's' at token 5"):
        drain(scheduler)
    assert not scheduler.scores


@pytest.mark.parametrize("samples", [4, 40])
def test_what_ended_before_a_bad_prompt_is_returned(samples: int) -> None:
    """The pass that ends the second prompt, badly, is launched before the first one's rows end."""
    params = SamplingParams(max_tokens=5)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], samples), ([3] * 10, 4)], params)
    scheduler = scheduler_of(
        plan,
        model,
        model.new_cache(400, 2),
        params,
        max_rows=samples + 4,
        prefill_chunk=2,
        run_ahead=True,
    )
    model.bad_at = 9
    finished: list[Completion] = []
    with pytest.raises(NumericsError, match="prompt 'p1' at token 9"):
        while True:
            finished += scheduler.step()
            scheduler.check()
    assert tokens_of(finished).items() <= expected(model, plan, params).items()
    assert len(finished) == samples


def test_samples_that_end_together_are_reported_while_others_run() -> None:
    params = SamplingParams(max_tokens=12)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3, 4 + i], 32) for i in range(4)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(1000, 4), params, max_rows=32, run_ahead=True
    )
    finished: list[Completion] = []
    reported = []
    while scheduler.has_work:
        ended = scheduler.step()
        scheduler.check()
        finished += ended
        reported.append(len(ended))
    assert tokens_of(finished) == expected(model, plan, params)
    assert scheduler.usage.decode_steps == 4 * 11  # nobody waits for a place
    # All but the last 32, which nothing comes after, are four live rows' worth of tokens a step.
    assert sorted(reported)[-1] == 32 and sorted(reported)[-2] <= 4 * 32 // 12
    assert len(scheduler.run.rows.used()) == 0


@pytest.mark.parametrize(
    ("prompts", "max_tokens"),
    [
        ([([2, 3, 4 + i % 20, 4 + i // 20], 1) for i in range(300)], 1),
        ([([2, 3], 64), ([3] * 60, 1)], 24),
        ([([2, 3], 64), *(([3, 4, 5 + i], 1) for i in range(12))], 24),
    ],
)
def test_not_more_and_more_samples_wait_to_be_reported(
    prompts: list[tuple[list[int], int]], max_tokens: int
) -> None:
    """Few rows are live, or none, for those that wait to be told by."""
    params = SamplingParams(max_tokens=max_tokens)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of(prompts, params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(1000, 4), params, max_rows=64, prefill_chunk=16, run_ahead=True
    )
    reported = [len(scheduler.step())]
    while scheduler.has_work:
        reported.append(len(scheduler.step()))
        scheduler.check()
    assert sum(reported) == sum(samples for _, samples in prompts)
    assert reported[-1] <= 16
    assert len(scheduler.run.rows.request) <= 128


def test_what_the_pass_under_way_has_ended_is_returned_before_out_of_memory() -> None:
    """And the tensors of the pass that failed are free at once, for whoever tries again."""
    params = SamplingParams(max_tokens=4)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], 4), ([3] * 6, 4)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(200, 2), params, max_rows=4, run_ahead=True
    )
    held: list[weakref.ref[Tensor]] = []

    def full(batch: Batch) -> Tensor:
        activations = batch.tokens_T.clone()
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("full")

    finished: list[Completion] = []
    while scheduler.usage.decode_steps < 3:
        finished += scheduler.step()
    assert not finished  # the last step is under way
    model.forward = full  # type: ignore[method-assign]
    gc.disable()
    try:
        with pytest.raises(CapacityError, match="no memory left"):
            while True:
                finished += scheduler.step()
        assert len(held) == 1 and held[0]() is None
    finally:
        gc.enable()
    assert len(tokens_of(finished)) == 4


def test_whoever_leaves_a_run_gets_what_has_ended() -> None:
    params = SamplingParams(max_tokens=6)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], 20), ([3] * 9, 20)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(1000, 4), params, max_rows=20, run_ahead=True
    )
    finished: list[Completion] = []
    while not finished:
        finished += scheduler.step()
    assert len(finished) < 20
    finished += scheduler.take_finished()
    scheduler.close()
    want = expected(model, plan, params)
    assert tokens_of(finished) == {key: want[key] for key in want if key[0] == "p0"}


def test_passes_are_launched_while_another_is_under_way() -> None:
    """Prompts come in while rows are decoded, and rows end: there is always a pass under way."""
    params = SamplingParams(max_tokens=12, seed=3)
    model = HistoryModel()
    plan = plan_of([([2, 3, 4 + i % 20, 4 + i // 20], 3) for i in range(50)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(2000, 4), params, max_rows=12, prefill_chunk=8, run_ahead=True
    )
    alone = steps = 0
    finished: list[Completion] = []
    while scheduler.has_work:
        alone += scheduler.flight is None
        finished += scheduler.step()
        steps += 1
    assert tokens_of(finished) == expected(model, plan, params)
    assert steps > 100 and alone <= 3


def test_new_prompts_take_turns_with_many_live_rows() -> None:
    params = SamplingParams(max_tokens=30)
    model = HistoryModel(eos_bias=-20.0)
    plan = plan_of([([2, 3], 8), ([3] * 60, 8)], params)
    scheduler = scheduler_of(
        plan, model, model.new_cache(500, 4), params, max_rows=10, prefill_chunk=6, run_ahead=True
    )
    kinds = []
    while scheduler.has_work and scheduler.usage.prefill_steps < 11:
        before = scheduler.usage.decode_steps
        scheduler.step()
        kinds.append("decode" if scheduler.usage.decode_steps > before else "prefill")
    assert kinds[kinds.index("decode") :][:12] == ["decode", "prefill"] * 6


def test_what_cannot_fit_alone_is_refused_with_the_numbers() -> None:
    params = SamplingParams(max_tokens=50)
    plan = plan_of([([2, 3, 4], 4), ([5] * 100, 1)], params)
    plan.check_fits(smallest_pool(plan, 4), 4)
    with pytest.raises(CacheFullError, match="'p1'"):  # not the first one that is too large
        plan.check_fits(1, 4)
    with pytest.raises(CapacityError, match=r"'p1' \(100 tokens, max_tokens 50\) needs 152 .* 148"):
        plan.check_fits(smallest_pool(plan, 4) - 1, 4)


def test_a_prompt_that_was_half_computed_anew_leaves_room_for_one_below_it() -> None:
    params, model = SamplingParams(max_tokens=9), HistoryModel(eos_bias=-20.0, recurrent=True)
    cache = model.new_cache(50, 4, num_states=4)
    scheduler = scheduler_of(plan_of([], params), model, cache, params, prefill_chunk=2)
    trunk = [2, 3, 4, 5, 6, 7, 8]
    above = scheduler.run.store.add(None, np.array(trunk, np.int32))
    first = scheduler.add(request("first", trunk, 1, params), above, 0, [0], makes_segments=False)
    while not len(scheduler.queue.live_slots):
        scheduler.step()
    again = scheduler.add(request("again", trunk, 1, params), above, 0, [0], makes_segments=False)
    scheduler.step()
    assert above.start < above.computed < above.stop
    for each in (again, first):
        scheduler.cancel(each.index)
        scheduler.check()
    segment = above
    for token in (9, 10):
        segment = scheduler.run.store.add(segment, np.array([token], np.int32))
    scheduler.add(
        request("below", [*trunk, 9, 10], 1, params), segment, 0, [0], makes_segments=False
    )
    (found,) = drain(scheduler)
    assert found.tokens == sample_alone(model, [*trunk, 9, 10], "below", 0, params, limit=9)


def test_who_drops_a_prompt_half_computed_anew_leaves_it_whole_for_others() -> None:
    params, model = SamplingParams(max_tokens=5), HistoryModel(eos_bias=-20.0, recurrent=True)
    cache = model.new_cache(50, 4)
    plan = plan_of([], params, "off")
    scheduler = scheduler_of(plan, model, cache, params, max_rows=2, prefill_chunk=2)
    store, trunk, prompt = scheduler.run.store, [2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9, 10]
    above = store.add(None, np.array(trunk, np.int32))
    below = store.add(above, np.array(prompt[7:], np.int32))
    scheduler.add(request("before", prompt, 4, params), below, 0, range(4), makes_segments=False)
    stays = scheduler.add(request("stays", prompt, 1, params), below, 0, [0], makes_segments=False)
    while stays.index not in scheduler.run.rows.request[scheduler.queue.live_slots]:
        scheduler.step()
    assert stays.opened == [below]  # its first token was drawn with those before it
    others = [
        scheduler.add(request(name, tokens, 1, params), segment, 0, [0], makes_segments=False)
        for name, tokens, segment in (("above", trunk, above), ("below", prompt, below))
    ]
    scheduler.step()
    assert above.start < above.computed < above.stop and below.computed == below.start
    for other in others:
        scheduler.cancel(other.index)
        scheduler.check()
    found = {sample.prompt_id: sample.tokens for sample in drain(scheduler)}
    assert found["stays"] == sample_alone(model, prompt, "stays", 0, params, limit=5)


def test_deep_chain_and_wide_fan() -> None:
    params = SamplingParams(max_tokens=3)
    chain = [([2 + i % 3 for i in range(length)], 1) for length in range(1, 14)]
    fan = [([9, 9, 9, 5 + i % 10, 5 + i // 10 % 10, 5 + i // 100], 1) for i in range(300)]
    for sharing in SHARING:
        plan = plan_of(chain + fan, params, sharing)
        model = HistoryModel()
        scheduler = scheduler_of(plan, model, model.new_cache(6_000, 4), params, max_rows=600)
        assert tokens_of(drain(scheduler, check=False)) == expected(model, plan, params)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_chain_of_prompts_takes_few_passes(page_size: int) -> None:
    params = SamplingParams(max_tokens=2)
    tokens = [2 + i % 7 for i in range(80)]
    plan = plan_of([(tokens[:length], 1) for length in range(1, 81)], params, "off")
    assert len(plan.segments) == 80
    model = HistoryModel()
    cache = model.new_cache(400, page_size)
    scheduler = scheduler_of(plan, model, cache, params, max_rows=80, prefill_chunk=2000)
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    # The last segment has none below it that waits, so it copies tokens instead of repeating them.
    assert scheduler.usage.prefill_steps <= 2
    assert scheduler.usage.prompt_tokens_computed == 80
    assert scheduler.usage.recomputed_tokens < 80 * page_size


def test_levels_that_few_passes_compute_repeat_no_token() -> None:
    params = SamplingParams(max_tokens=2)
    prompts = [([2, 3, 4, 5 + i, 6 + j], 1) for i in range(10) for j in range(2)]
    plan = plan_of(prompts, params, "off")
    model = HistoryModel()
    scheduler = scheduler_of(plan, model, model.new_cache(400, 8), params, prefill_chunk=200)
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    assert scheduler.usage.prefill_steps == 3 and scheduler.usage.recomputed_tokens == 0


def test_several_chains_take_about_one_pass_each() -> None:
    params, length, page_size = SamplingParams(max_tokens=2), 20, 8
    texts = [[2 + text, *([3] * length)] for text in range(10)]
    plan = plan_of([(text[:num], 1) for text in texts for num in range(1, length + 1)], params)
    model = HistoryModel()
    cache = model.new_cache(600, page_size)
    scheduler = scheduler_of(plan, model, cache, params, max_rows=200, prefill_chunk=400)
    assert tokens_of(drain(scheduler)) == expected(model, plan, params)
    assert scheduler.usage.prefill_steps <= len(texts) + 2
    not_in_full_pages = sum(num % page_size for num in range(1, length))
    assert 0 < scheduler.usage.recomputed_tokens <= len(texts) * not_in_full_pages
