"""Draws: the right distribution, and randomness that belongs to the row."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.ops.sampling import draw as sampling
from treegen.ops.sampling.batch import NO_END, Bias, SamplingBatch
from treegen.ops.sampling.draw import draw, uniforms
from treegen.prompts.plan.draws import row_seed


def batch_of(params: SamplingParams, rows: int) -> SamplingBatch:
    return SamplingBatch.of([params], torch.zeros(rows, dtype=torch.int64))


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int) -> torch.Tensor:
    seeds = torch.tensor([[row_seed(0, "p", i) for i in range(draws)]])
    tokens = draw(logits[None], seeds, torch.zeros_like(seeds), batch_of(params, 1)).tokens_PN
    return torch.bincount(tokens[0], minlength=len(logits)).double() / draws


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution, by the definition, in float64."""
    p = (logits.double() / params.temperature).softmax(-1)
    p[p < params.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda t: (-float(p[t]), t))
    if params.top_k:
        p[order[params.top_k :]] = 0
    if params.top_p < 1:
        mass, total = 0.0, float(p.sum())
        for rank, token in enumerate(order):
            if rank and mass >= params.top_p * total:
                p[token] = 0
            else:
                mass += float(p[token])
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.4),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.05),
        SamplingParams(min_p=0.3),
        SamplingParams(top_k=1),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    """Every token within 5 standard errors of 20,000 draws: a false alarm has p < 1e-4."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    want, draws = reference(logits, params), 20_000
    got = frequencies(logits, params, draws)
    assert (got[want == 0] == 0).all()
    assert ((got - want).abs() <= 5 * (want * (1 - want) / draws).sqrt() + 1e-9).all()


def test_log_probabilities_of_the_draw_are_those_that_are_drawn_from() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    plain: dict[str, Any] = {"temperature": 0.7}
    kinds: list[dict[str, Any]] = [
        plain,
        {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
    ]
    params = [SamplingParams(**kind, logprobs_mode="processed_logprobs") for kind in kinds]
    params.append(SamplingParams(**plain, logprobs=3))
    seeds = torch.tensor([[row_seed(0, "p", i) for i in range(200)]] * 4)
    batch = SamplingBatch.of(params, torch.arange(4))
    draws = draw(logits.expand(4, -1), seeds, torch.zeros_like(seeds), batch)
    assert draws.top_logprobs_PK is not None and draws.top_tokens_PK is not None
    wants = [reference(logits, each).log() for each in params[:3]] + [
        logits.double().log_softmax(-1)
    ]
    for row, want in enumerate(wants):
        logprobs = draws.logprobs_PN[row].double()
        assert torch.allclose(logprobs, want[draws.tokens_PN[row]], atol=1e-5)
        assert torch.allclose(
            draws.top_logprobs_PK[row].double(), want[draws.top_tokens_PK[row]], atol=1e-5
        )
    assert not SamplingParams(logprobs_mode="processed_logprobs").reports_processed
    with pytest.raises(InputError, match="logprobs_mode must be raw_logprobs or processed"):
        SamplingParams(logprobs_mode="wide")  # type: ignore[arg-type]


def test_uniforms_are_uniform_and_independent() -> None:
    """Over rows, over steps, and between neighbours; bounds of about 5 standard errors."""
    seeds = torch.tensor([row_seed(7, f"p{i // 50}", i % 50) for i in range(2000)])
    steps = torch.arange(50)
    u = uniforms(seeds[:, None].expand(-1, 50), steps.expand(2000, 50))
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    counts = torch.histc(u, bins=100, min=0, max=1)
    assert ((counts - n / 100).abs() < 5 * math.sqrt(n / 100)).all()
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        correlation = torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(a.numel())
    assert len(u.unique()) == n


def test_seeds_differ_by_run_prompt_and_sample() -> None:
    runs, prompts = (0, 1, 2**63 - 1), ("a", "b", "1", "a\0", "\ud800")
    seeds = {row_seed(r, p, i) for r in runs for p in prompts for i in range(50)}
    assert len(seeds) == 3 * 5 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(0, "p", 3) == 3520849008867759232  # never changes: old runs must resume


@pytest.mark.parametrize(
    "params",
    [
        [SamplingParams(top_p=0.8), SamplingParams(top_k=3, min_p=0.01), SamplingParams()],
        [SamplingParams(temperature=0, logprobs=4), SamplingParams(logprobs=2)],
        [SamplingParams(temperature=0)],
    ],
)
@pytest.mark.parametrize("at_once", [1, 90, 130])
def test_rows_are_drawn_in_slices_that_fit_in_memory(
    params: list[SamplingParams], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(11, 40)
    seeds, steps = torch.randint(0, 2**62, (11, 3)), torch.randint(0, 9, (11, 3))
    batch = SamplingBatch.of(params, torch.arange(11) % len(params))
    want = draw(logits, seeds, steps, batch)
    monkeypatch.setattr(sampling, "_MAX_LOGITS", at_once)
    got = draw(logits, seeds, steps, batch)
    for field in fields(want):
        actual, whole = getattr(got, field.name), getattr(want, field.name)
        assert (actual is None) == (whole is None)
        assert whole is None or torch.equal(actual, whole)


@given(st.integers(1, 9), st.integers(0, 2**31), st.data())
def test_a_draw_does_not_depend_on_its_batch(rows: int, seed: int, data: st.DataObject) -> None:
    """Rows alone, together, and many draws of one row at once give the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 40, generator=generator)
    params = data.draw(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.5, 1.0]),
            top_k=st.sampled_from([0, 3]),
            top_p=st.sampled_from([1.0, 0.6]),
        )
    )
    seeds = torch.randint(0, 2**62, (rows, 3), generator=generator)
    steps = torch.randint(0, 500, (rows, 3), generator=generator)
    many = draw(logits, seeds, steps, batch_of(params, rows))
    for row in range(rows):
        for n in range(3):
            one = draw(
                logits[row : row + 1],
                seeds[row : row + 1, n : n + 1],
                steps[row : row + 1, n : n + 1],
                batch_of(params, 1),
            )
            assert one.tokens_PN[0, 0] == many.tokens_PN[row, n]
            assert one.logprobs_PN[0, 0] == many.logprobs_PN[row, n]


def test_rows_may_have_different_parameters() -> None:
    logits = torch.randn(3, 30)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams()]
    seeds, steps = torch.arange(3)[:, None], torch.zeros(3, 1, dtype=torch.int64)
    mixed = draw(logits, seeds, steps, SamplingBatch.of(params, torch.arange(3)))
    for row, one in enumerate(params):
        alone = draw(logits[row : row + 1], seeds[row : row + 1], steps[:1], batch_of(one, 1))
        assert mixed.tokens_PN[row] == alone.tokens_PN[0]
    assert mixed.tokens_PN[0] == logits[0].argmax()


def test_logprobs_are_of_the_unchanged_model() -> None:
    logits = torch.randn(5, 30)
    params = SamplingParams(temperature=0.3, top_k=4, logprobs=3)
    seeds = torch.arange(10).view(5, 2)
    draws = draw(logits, seeds, seeds * 0, batch_of(params, 5))
    want = logits.log_softmax(-1)
    torch.testing.assert_close(draws.logprobs_PN, want.gather(1, draws.tokens_PN))
    assert draws.top_logprobs_PK is not None and draws.top_tokens_PK is not None
    torch.testing.assert_close(draws.top_logprobs_PK, want.topk(3).values)
    assert draws.top_tokens_PK.equal(want.topk(3).indices)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 3.0
    seeds = torch.arange(1000)[None]
    assert (draw(logits, seeds, seeds * 0, batch_of(SamplingParams(), 1)).tokens_PN == 2).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": 1e-9}, "temperature 1e-09 is too small to divide the logits by"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": -2}, "top_k must be at least 0"),
        ({"min_p": 2}, "min_p must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"seed": -1}, "seed must be in"),
        ({"stop": ""}, "stop strings must be non-empty text"),
        ({"stop": ["a", ""]}, "stop strings must be non-empty text"),
        ({"stop_token_ids": [-3]}, "stop_token_ids must not be negative"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        # Arrays of integers cannot hold these.
        ({"min_tokens": 10**30, "max_tokens": 10**30}, "min_tokens must be at most 2,147,483,647"),
        ({"max_thinking_tokens": 2**63 - 1}, "max_thinking_tokens must be at most 2,147,483,647"),
        ({"confidence": 10**30}, "confidence must be at most 2,147,483,647"),
        ({"confidence_window": 10**30}, "confidence_window must be at most 2,147,483,647"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_stops_are_a_tuple() -> None:
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stops == ("ab", "c")
    assert SamplingParams().stops == ()
    assert np.isfinite(SamplingParams().temperature)


def check_biased_draws(
    kinds: list[Bias], params: list[SamplingParams], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different kinds draw what each draws alone from biased logits.

    Their logprobs are those of the unbiased ones.
    """
    size, rows = 40, 60
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    index = torch.arange(rows) % len(kinds)
    seeds, steps = torch.arange(rows)[:, None] * 977, torch.arange(rows)[:, None] % 6
    batch = SamplingBatch.of(params, index, kinds)
    assert not batch.is_plain
    drawn = draw(logits, seeds, steps, batch)
    for row in range(rows):
        kind, biased = kinds[int(index[row])], logits[row].clone()
        for token, value, until in zip(kind.token, kind.value, kind.until, strict=True):
            biased[token] += float(value) if int(steps[row]) < until else 0.0
        if kind.allowed is not None:
            biased[[token not in kind.allowed for token in range(size)]] = -math.inf
        one = SamplingBatch.of([params[int(index[row])]], torch.zeros(1, dtype=torch.int64))
        want = int(draw(biased[None], seeds[row : row + 1], steps[row : row + 1], one).tokens_PN)
        assert int(drawn.tokens_PN[row]) == want
        assert kind.allowed is None or want in kind.allowed
        of_model = float(logits[row].log_softmax(-1)[want])
        assert float(drawn.logprobs_PN[row]) == pytest.approx(of_model, abs=1e-5)
    monkeypatch.setattr(sampling, "_MAX_LOGITS", 7 * size)
    assert torch.equal(draw(logits, seeds, steps, batch).tokens_PN, drawn.tokens_PN)


def test_biases_are_added_while_they_hold_and_logprobs_stay_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [
        Bias(np.array([3, 5]), np.array([-math.inf, -math.inf], np.float32), np.array([2, 2])),
        Bias(np.array([], np.int64), np.array([], np.float32), np.array([], np.int64)),
        Bias(
            np.array([3, 5, 7]),
            np.array([-math.inf, 2.5, -4], np.float32),
            np.array([4, NO_END, NO_END]),
        ),
    ]
    params = [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=0),
        SamplingParams(top_k=9, min_p=0.02),
    ]
    assert SamplingBatch.of(params[1:2], torch.zeros(20, dtype=torch.int64), kinds[1:2]).is_plain
    check_biased_draws(kinds, params, 4, monkeypatch)


def test_only_allowed_tokens_are_drawn_and_logprobs_stay_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = np.array([], np.int64), np.array([], np.float32), np.array([], np.int64)
    kinds = [
        Bias(*empty, allowed=np.array([0, 3, 39])),
        Bias(*empty),
        Bias(
            np.array([7]), np.array([3], np.float32), np.array([NO_END]), allowed=np.array([7, 8])
        ),
        Bias(*empty, allowed=np.array([21])),
    ]
    params = [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=9),
        SamplingParams(temperature=0),
        SamplingParams(temperature=2.0),
    ]
    only = SamplingBatch.of(params[3:], torch.zeros(20, dtype=torch.int64), kinds[3:])
    assert not only.is_plain
    check_biased_draws(kinds, params, 5, monkeypatch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e300}, "temperature must be at most 10000"),
        ({"top_p": 10**400}, "top_p must be a finite number"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be from 0 to max_tokens"),
        ({"logit_bias": {3: 101}}, "values from -100 to 100"),
        ({"logit_bias": {"3": 1}}, "a token of logit_bias must be an integer"),
        ({"logit_bias": [3]}, "logit_bias must map"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be an integer"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list"),
        (
            {"allowed_token_ids": [5], "regex": "a"},
            "regex and allowed_token_ids cannot be",
        ),
        ({"ignore_eos": "false"}, "ignore_eos must be True or False"),
        ({"include_stop": 1}, "include_stop must be True or False"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": [5]}, "stop strings must be"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be an integer"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be at least 0"),
        ({"bad_words": "no"}, "bad_words must be a list"),
        ({"bad_words": ["no", ""]}, "bad_words must contain non-empty text"),
    ],
)
def test_parameters_of_others_are_honoured_or_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


def test_neutral_values_and_none_mean_nothing() -> None:
    neutral = SamplingParams(
        stop=None,
        stop_token_ids=(),
        presence_penalty=0.0,
        frequency_penalty=0,
        repetition_penalty=1.0,
        bad_words=[],
        logit_bias=None,
        min_tokens=0,
        seed=None,
    )
    assert neutral == SamplingParams() and not neutral.stops and not neutral.stop_token_ids
    texts = (text for text in ("a", "b"))
    assert SamplingParams(stop=texts).stops == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(include_stop_str_in_output=True).include_stop


def test_forced_tokens_take_the_place_of_draws_and_have_the_models_logprobs() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    seeds, steps = torch.arange(10).reshape(5, 2), torch.zeros(5, 2, dtype=torch.int64)
    forced = torch.tensor([-1, 3, -1, 49, 0])
    for how in (SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=0)):
        params = SamplingBatch.of([how], torch.zeros(5, dtype=torch.int64))
        plain, found = (
            draw(logits, seeds, steps, params),
            draw(logits, seeds, steps, params, forced),
        )
        want = torch.where(forced[:, None] >= 0, forced[:, None], plain.tokens_PN)
        assert found.tokens_PN.equal(want)
        torch.testing.assert_close(found.logprobs_PN, logits.log_softmax(-1).gather(1, want))
