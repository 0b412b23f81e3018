"""Guessed tokens change no sample, whoever guesses and whatever else a run does."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_cases import FEW_SHOT, QUESTIONS, load, tree_of
from guessing import Always, Knowing, guessed
from safetensors.torch import load_file, save_file

from treegen import Completion, SamplingParams
from treegen.common.drafter import DraftContext
from treegen.engine.passes.decode import DecodeSteps
from treegen.engine.requests.output_processor import OutputProcessor
from treegen.engine.requests.pass_results import PassResultProcessor
from treegen.engine.speculative.draft_length import SingleRateDrafter
from treegen.errors import CacheFullError, InputError

FAMILIES = [
    "llama",
    "gpt2",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "mixtral",
    "cohere2",
    "gemma3n",
    "mistral_swa",
    "qwen3",
    "phi3",
    "gemma3_on_text",
]
PARAMS = SamplingParams(max_tokens=24, seed=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether guesses pay is not what is tested here."""
    monkeypatch.setattr("treegen.engine.speculative.speculation.DraftLengthController", Always)


def assert_same(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one.tokens, one.text, one.finish_reason, one.stop, one.thinking) == (
            other.tokens,
            other.text,
            other.finish_reason,
            other.stop,
            other.thinking,
        )
        for name in ("logprobs", "confidences", "certainties"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)
        ids = [[token for token, _ in pairs] for pairs in one.top_logprobs]
        assert ids == [[token for token, _ in pairs] for pairs in other.top_logprobs]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_every_family_are_those_without_guesses(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    llm = load(tmp_path)
    plain = llm.run(tree_of(4), PARAMS)
    assert plain.usage.tokens_per_step == 1
    again = guessed(llm, Knowing(plain.completions)).run(tree_of(4), PARAMS)
    assert_same(again.completions, plain.completions)
    usage = again.usage
    assert usage.decoded_tokens == plain.usage.decoded_tokens
    assert usage.decode_steps < plain.usage.decode_steps
    assert 0.3 * usage.drafted_tokens < usage.accepted_tokens < usage.drafted_tokens
    assert 1.4 < usage.tokens_per_step < 8


def test_samples_that_others_are_guessed_by_run_first(checkpoint: Path) -> None:
    llm = load(checkpoint, speculate="ngram", max_rows=12)
    with llm.stream(tree_of(10), PARAMS) as stream:
        rows, live = stream.scheduler.run.rows, stream.scheduler.queue
        while not len(live.live_slots):
            stream.step()
        first = np.stack(
            [rows.request[live.live_slots], rows.sample[live.live_slots]], axis=1
        ).tolist()
        done = list(stream)
    assert sorted(first) == [*([0, i] for i in range(8)), *([1, i] for i in range(4))]
    plain = load(checkpoint, max_rows=12).run(tree_of(10), PARAMS).completions
    assert_same(sorted(done, key=lambda c: (c.prompt_id, c.sample_index)), plain)


def test_rows_that_are_over_leave_while_the_next_pass_is_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the results of a pass and the launch of the next one the device waits."""
    events: list[str] = []

    def watch(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any) -> Any:
            events.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, noted)

    watch(PassResultProcessor, "record")
    watch(DecodeSteps, "verify")
    watch(OutputProcessor, "end")
    llm = load(checkpoint, speculate="ngram", max_rows=8, run_ahead=True)
    lengths = [replace(PARAMS, seed=3, max_tokens=length) for length in (9, 16, 24)]
    llm.run(tree_of(5), lengths)
    before = [events[place - 1] for place, name in enumerate(events) if name == "end"]
    assert before.count("verify") >= 4  # with the last rows of a run no other pass is launched
    assert before.count("verify") >= len(before) - 2


_OPTIONS: list[dict[str, Any]] = [
    {"sharing": "off", "page_size": 4},
    {"sharing": "all", "max_rows": 5},
    {"run_ahead": True},
    {"run_ahead": True, "max_rows": 3, "prefill_chunk": 30},
    {"memory": 6 * 10**4, "page_size": 4, "run_ahead": True},
    {"draft_tokens": 1, "reproducible": True},
]
_ASKED: list[dict[str, Any]] = [
    {"stop": ["a", "th"]},
    {"temperature": 0},
    {"top_p": 0.7, "logprobs": 3},
    {"min_tokens": 7, "ignore_eos": False, "logit_bias": {1: 6.0}},
    {"confidence": 4, "self_certainty": True, "min_confidence": 3.2, "confidence_window": 5},
    {"max_thinking_tokens": 5, "reasoning_tags": ("e", "z"), "thinking_end": " zz"},
]
_MIXED = [(_OPTIONS[(place + more) % 6], _ASKED[place]) for place in range(6) for more in (0, 1)]


@pytest.mark.parametrize(("options", "settings"), _MIXED, ids=str)
def test_whatever_ends_or_changes_a_sample_does_so_where_tokens_are_guessed(
    checkpoint: Path, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    llm = guessed(load(checkpoint, speculate="ngram", **options), "off")
    params = SamplingParams(**{"max_tokens": 24, "seed": 5, "ignore_eos": True, **settings})
    plain = llm.run(tree_of(4), params)
    again = guessed(llm, Knowing(plain.completions)).run(tree_of(4), params)
    assert_same(again.completions, plain.completions)
    assert again.usage.accepted_tokens > 0
    assert_same(guessed(llm, "ngram").run(tree_of(4), params).completions, plain.completions)


def test_siblings_and_the_prompt_are_guessed_from(checkpoint: Path) -> None:
    """Samples of sharply peaked draws repeat those before them, so most guesses are right."""
    llm = load(checkpoint, max_rows=2)
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.05, ignore_eos=True)
    plain = llm.run(tree_of(4), params)
    again = guessed(llm, "ngram").run(tree_of(4), params)
    assert_same(again.completions, plain.completions)
    assert again.usage.tokens_per_step > 1.2
    assert guessed(llm, "off").run(tree_of(2), params).usage.drafted_tokens == 0


def test_a_function_is_told_of_each_sample_and_may_guess_nothing(checkpoint: Path) -> None:
    llm = load(checkpoint)
    seen: list[tuple[str, int, int, int]] = []

    def function(contexts: Sequence[DraftContext]) -> list[list[int]]:
        seen.extend((c.prompt_id, c.sample_index, len(c.prompt), len(c.tokens)) for c in contexts)
        return [[] for _ in contexts]

    wanted = llm.run(tree_of(2), PARAMS)
    got = guessed(llm, function).run(tree_of(2), PARAMS)
    assert_same(got.completions, wanted.completions)
    assert got.usage.drafted_tokens == got.usage.accepted_tokens == 0
    assert {(name, sample) for name, sample, _, _ in seen} == {
        (str(i), sample) for i in range(3) for sample in range(2)
    }
    lengths = {request.id: len(request.tokens) for request in got.plan.requests}
    assert all(lengths[name] == length for name, _, length, _ in seen)
    assert {count for _, _, _, count in seen} >= set(range(2, 24))
    # What is guessed beyond what a pass can use is not looked at.
    endless = guessed(llm, lambda contexts: [itertools.repeat(5) for _ in contexts])
    assert_same(endless.run(tree_of(2), PARAMS).completions, wanted.completions)


@pytest.mark.parametrize("found", [None, [[1]], [["a"]] * 6, [1.5] * 6, [[1.5]] * 6], ids=str)
def test_a_function_that_returns_something_else_is_told_so(checkpoint: Path, found: Any) -> None:
    llm = guessed(load(checkpoint), lambda contexts: found)
    with pytest.raises(InputError, match=r"list of token ids for each of 6 samples, got"):
        llm.run(tree_of(2), PARAMS)
    assert len(guessed(llm, "off").run(tree_of(2), PARAMS).completions) == 6


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_tokens_that_a_grammar_forces_say_nothing_about_a_drafter(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    update = SingleRateDrafter.update_acceptance

    def record(self: SingleRateDrafter, *counts: Any) -> None:
        update(self, *counts)
        rates.append(self.acceptance_rate)

    monkeypatch.setattr(SingleRateDrafter, "update_acceptance", record)
    llm = guessed(load(checkpoint), lambda contexts: [[] for _ in contexts])
    params = SamplingParams(regex="(one two three four|five six seven eight)", max_tokens=30)
    result = llm.run(tree_of(3), params)
    assert result.usage.accepted_tokens > 0
    assert rates and rates == pytest.approx([SingleRateDrafter().acceptance_rate] * len(rates))


@pytest.fixture(scope="module")
def drafts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with noise on its weights, which draws much the same."""
    path = tmp_path_factory.mktemp("drafts") / "model"
    shutil.copytree(checkpoint, path)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_a_draft_model_draws_what_the_model_will_draw(
    checkpoint: Path, drafts: Path, options: dict[str, Any]
) -> None:
    plain = load(checkpoint).run(tree_of(4), PARAMS)
    llm = load(checkpoint, draft_model=str(drafts), **options)
    again = llm.run(tree_of(4), PARAMS)
    assert_same(again.completions, plain.completions)
    assert again.usage.tokens_per_step > 1.3
    assert again.usage.accepted_tokens > 0.3 * again.usage.drafted_tokens
    llm.cache.pool.check([])


def test_a_draft_model_knows_what_was_decoded_without_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself guesses, so all is right, also after steps in which it did not guess."""
    turns = itertools.cycle([False] * 5 + [True])
    monkeypatch.setattr(Always, "is_due", lambda *_: next(turns))
    llm = load(checkpoint, draft_model=str(checkpoint))
    with llm.keep(FEW_SHOT):
        for _ in range(2):
            usage = llm.run(tree_of(4), PARAMS).usage
            assert usage.accepted_tokens == usage.drafted_tokens > 30


@pytest.mark.parametrize("how", ["draft", "ngram", "knowing"])
def test_rows_that_gave_way_come_back_the_same(checkpoint: Path, drafts: Path, how: str) -> None:
    plain = load(checkpoint).run(tree_of(4), PARAMS)
    llm = load(
        checkpoint, run_ahead=True, **({"draft_model": str(drafts)} if how == "draft" else {})
    )
    if how != "draft":
        guessed(llm, Knowing(plain.completions) if how == "knowing" else how)
    got = []
    with llm.stream(tree_of(4), PARAMS) as stream:
        for turn in itertools.count():
            if not stream.has_work:
                break
            got += stream.step()
            if turn % 4 == 3 and turn < 40:
                stream.scheduler._collect_results()
                stream.scheduler._admission.reclaim_pages()
            stream.scheduler.check()
        assert stream.usage.preemptions > 1
    got.sort(key=lambda c: (c.prompt_id, c.sample_index))
    assert_same(got, plain.completions)


def test_a_search_with_a_draft_model_finds_what_it_finds_without(
    checkpoint: Path, drafts: Path
) -> None:
    params = SamplingParams(max_tokens=9, seed=5, ignore_eos=True)
    found = []
    for options in ({}, {"draft_model": str(drafts)}, {"speculate": "ngram"}):
        llm = load(checkpoint, **options)
        with llm.session(params) as session:
            level = [session.root(QUESTIONS[0])]
            for _ in range(3):
                started = [session.start(node.sample(3)) for node in level[:2]]
                while not all(each.is_done for each in started):
                    session.step()
                level = [child for each in started for child in each.result]
            found.append([node.path_text for node in level])
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_guessed_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(InputError, match="speculate must be off or ngram or a function, got 'ng"):
        load(checkpoint, speculate="ngrams")
    with pytest.raises(InputError, match="draft_tokens must be at least 1, got 0"):
        load(checkpoint, speculate="ngram", draft_tokens=0)
    with pytest.raises(InputError, match="speculate and draft_model cannot be used together"):
        load(checkpoint, speculate="ngram", draft_model=str(checkpoint))
    with pytest.raises(InputError, match="is not supported with tensor_parallel_size"):
        load(checkpoint, draft_model=str(checkpoint), tensor_parallel_size=2)
    with pytest.raises(InputError, match="demo and the model have different tokenizers"):
        load(checkpoint, draft_model="demo")
    tiny_models.save_tiny_model(tmp_path, "qwen3_next")
    with pytest.raises(
        InputError, match="recurrent layers, which are not supported in a draft model"
    ):
        load(checkpoint, draft_model=str(tmp_path))
    for options in ({"speculate": "ngram"}, {"draft_model": str(tmp_path)}):
        (name,) = options
        with pytest.raises(InputError, match=f"^{name} is not supported .*; remove {name}$"):
            load(tmp_path, **options)


def test_the_size_that_an_error_names_is_enough_for_both_caches(checkpoint: Path) -> None:
    with pytest.raises(CacheFullError, match="cannot hold a page") as caught:
        load(checkpoint, draft_model=str(checkpoint), memory=1000)
    named = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert named is not None
    load(checkpoint, draft_model=str(checkpoint), memory=int(named[1].replace(",", ""))).close()
