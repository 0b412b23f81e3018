"""Samples end where their confidence falls below a floor, whatever happens to their rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import EOS, HistoryModel, scheduler_of

from treegen import LLM, Node, SamplingParams
from treegen.common.outputs import Completion
from treegen.errors import InputError
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.plan import Request
from treegen.prompts.plan.requests import build_sample_requests

_K, _WINDOW = 4, 5


def _stops_at(confidences: Sequence[float], floor: float, window: int) -> int | None:
    """By the definition: after how many tokens a whole sample is to end; None if it is not."""
    for end in range(window, len(confidences) + 1):
        if float(np.sum(np.asarray(confidences[end - window : end], np.float64))) / window < floor:
            return end
    return None


def _check(ended: Completion, whole: Completion, floor: float, window: int) -> bool:
    """Assert that a sample is the start of the whole one; returns whether it ended early."""
    at = _stops_at(whole.confidences, floor, window)
    if at is None or at >= len(whole.tokens):  # its own end comes first
        assert ended == whole
        return False
    assert ended.tokens == whole.tokens[:at]
    assert ended.logprobs == whole.logprobs[:at]
    assert ended.confidences == whole.confidences[:at]
    assert (ended.finish_reason, ended.stop) == ("confidence", None)
    assert whole.text.startswith(ended.text)
    return True


def test_signals_are_what_they_are_by_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=generator) * 3
    logits[2, 5] = logits[3, :290] = -torch.inf
    seeds = torch.arange(7)[:, None]
    params = [
        SamplingParams(confidence=20, self_certainty=True),
        SamplingParams(confidence=3),
        SamplingParams(),
    ]
    index = torch.tensor([0, 1, 2, 0, 1, 0, 0])
    signals = draw(logits, seeds, seeds * 0, SamplingBatch.of(params, index)).signals_P2
    assert signals is not None
    for row, (confidence, certainty) in enumerate(signals.tolist()):
        logprobs = logits[row].double().log_softmax(-1)
        finite = logprobs[logprobs.isfinite()]
        k = params[int(index[row])].confidence
        top = finite.sort(descending=True).values[:k]
        assert confidence == pytest.approx(-float(top.mean()) if k else 0.0, rel=1e-5)
        uniform = -float((finite + np.log(len(finite))).mean())
        assert certainty == pytest.approx(uniform, rel=1e-5)
    plain = draw(logits, seeds, seeds * 0, SamplingBatch.of([SamplingParams()], index * 0))
    assert plain.signals_P2 is None
    both = draw(logits, seeds, seeds * 0, SamplingBatch.of(params, index))
    assert both.tokens_PN.equal(plain.tokens_PN)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_rows_end_as_whole_samples_say(run_ahead: bool, squeezed: bool, recurrent: bool) -> None:
    rng = np.random.default_rng(4)
    model = HistoryModel(eos_bias=-0.5, recurrent=recurrent)
    plan = compile_plan(
        [
            Request(f"p{i}", rng.integers(2, 24, 4 + 3 * i).astype(np.int32), 4, 4, 30)
            for i in range(4)
        ],
        token_bytes=64,
        num_layers=1,
    )
    params = SamplingParams(max_tokens=30, confidence=_K, confidence_window=_WINDOW)

    def run(floor: float | None) -> dict[tuple[str, int], Completion]:
        cache = model.new_cache(400, 4)
        with_floor = SamplingParams(
            max_tokens=30, confidence=_K, confidence_window=_WINDOW, min_confidence=floor
        )
        scheduler = scheduler_of(plan, model, cache, with_floor, max_rows=7, run_ahead=run_ahead)
        found: list[Completion] = []
        while scheduler.has_work:
            found += scheduler.step()
            scheduler.check()
            if squeezed and scheduler.has_work and rng.random() < 0.3:
                scheduler._collect_results()
                scheduler._admission.reclaim_pages()
        assert bool(scheduler.usage.preemptions) == squeezed
        scheduler.close()
        return {(c.prompt_id, c.sample_index): c for c in found}

    whole = run(None)
    assert params.confidence and all(len(c.confidences) == c.num_tokens for c in whole.values())
    means = [np.mean(c.confidences) for c in whole.values()]
    ends = set[bool]()
    for floor in np.quantile(means, [0.0, 0.3]).tolist():
        short = run(floor)
        assert short.keys() == whole.keys()
        ends |= {_check(short[key], whole[key], floor, _WINDOW) for key in whole}
    assert ends == {False, True}
    assert any(c.tokens[-1] == EOS for c in whole.values())


TREE = Node(
    "Solve it.\n",
    children=[Node(f"Question {i}?", id=f"q{i}", samples=8) for i in range(4)],
    samples=0,
)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), memory="2MiB", max_rows=6, prefill_chunk=50, run_ahead=True)


def test_floors_that_are_dealt_hold_for_what_is_dealt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=5, confidence=20, confidence_window=7)
    whole = {(c.prompt_id, c.sample_index): c for c in llm.run(TREE, params).completions}
    requests = build_sample_requests(TREE, llm.tokenizer, params, llm.spec)
    lows = sorted(
        min((sum(c.confidences[i : i + 7]) / 7 for i in range(c.num_tokens - 6)), default=9.0)
        for c in whole.values()
    )
    floors = {0: lows[-3], 1: lows[len(lows) // 2], 3: 0.0}
    found: list[Completion] = []
    with llm.open_planned_stream(llm.plan(TREE, params), [params] * len(requests)) as stream:
        stream.add_work([(place, [0, 1, 2]) for place in range(4)])
        while stream.has_work:
            found += stream.step()
        parts = [(place, [index]) for place in range(4) for index in range(3, 8)]
        random.Random(0).shuffle(parts)
        stream.add_work(parts, floors)
        while stream.has_work:
            found += stream.step()
            stream.scheduler.check()
    ends = []
    for ended in found:
        key = ended.prompt_id, ended.sample_index
        floor = floors.get(int(key[0][1:]), -np.inf) if key[1] >= 3 else -np.inf
        # Another batch rounds otherwise, so the rule is applied to the sample's own numbers.
        at = _stops_at(ended.confidences, floor, 7)
        ends.append(ended.finish_reason == "confidence")
        assert at == (ended.num_tokens if ends[-1] else None)
        assert ended.tokens == whole[key].tokens[: ended.num_tokens]
        assert ended.confidences == pytest.approx(
            whole[key].confidences[: ended.num_tokens], rel=1e-4
        )
    assert any(ends) and not all(ends)
    assert len(found) == len(whole)


def test_what_asks_for_nothing_is_told_nothing(llm: LLM) -> None:
    mixed = [
        SamplingParams(max_tokens=9, self_certainty=True),
        SamplingParams(max_tokens=9, confidence=2, logprobs=3),
        SamplingParams(max_tokens=9, logprobs=1),
        SamplingParams(
            max_tokens=9, temperature=0, confidence=1, min_confidence=1e9, confidence_window=2
        ),
    ]
    found = llm.run(TREE, mixed).completions
    by_prompt = {name: list(each) for name, each in itertools.groupby(found, lambda c: c.prompt_id)}
    for name, confidences, certainties in (("q0", 0, 1), ("q1", 1, 0), ("q2", 0, 0)):
        for c in by_prompt[name]:
            assert len(c.confidences) == confidences * c.num_tokens
            assert len(c.certainties) == certainties * c.num_tokens
            assert all(value > 0 for value in (*c.confidences, *c.certainties))
    assert [c.finish_reason for c in by_prompt["q3"]] == ["confidence"] * 8
    assert {c.num_tokens for c in by_prompt["q3"]} == {2}
    first = by_prompt["q1"][0]
    for confidence, top in zip(first.confidences, first.top_logprobs, strict=True):
        assert confidence == pytest.approx(-np.mean([value for _, value in top[:2]]), rel=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence": -1},
        {"min_confidence": 1.0},
        {"confidence": 2, "min_confidence": "low"},
        {"confidence_window": 0},
        {"self_certainty": 1},
    ],
)
def test_what_cannot_be_asked_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        SamplingParams(**wrong)  # type: ignore[arg-type]
