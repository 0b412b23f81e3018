"""Samples drawn again: resumed runs, thinking budgets, and near-ties."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from certified_run import certified as certified
from cli_cases import Command

from treegen import LLM, Node
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.near_ties import (
    NearTieResult,
    NearTies,
    Record,
    compare_records,
    max_ties,
    random_number,
)
from treegen.evals.pipeline.redraw import _record_tokens, redraw_samples
from treegen.evals.progress.run_progress import RunProgress
from treegen.ops.sampling.draw import uniforms
from treegen.prompts.token_text import Detokenizer
from treegen.report.certify.build import load_job_of, render_prompts
from treegen.runs import RunDir

pytestmark = pytest.mark.timeout(600)


def test_a_resumed_run_holds(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    assert treegen("eval", "gsm8k", "-L", "2", "-n", "3", "-o", run).code == 0
    samples = run / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    (run / "results.json").unlink()
    assert treegen("eval", "--resume", run).code == 0
    assert treegen("certify", run).code == 0
    file = run / "certificate.json"
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "6")
    assert done.code == 0 and "6 of 6 have the same tokens" in done.out, done.out


def test_the_progress_counts_redrawn_samples(certified: Path) -> None:
    counts: list[tuple[int, int, int]] = []

    class Remember(Listener):
        def track(self, steps: Iterator[RunProgress], title: str) -> None:
            counts.extend((now.started, now.done, now.planned) for now in steps)

    with RunDir.open(certified / "run") as run:
        prepared = render_prompts(load_job_of(run, {}))
        assert redraw_samples(run, prepared, Remember(), num=7, seed=0).holds
    assert counts[-1] == (0, 7, 7) and {planned for _, _, planned in counts} == {7}


def test_samples_with_thinking_budgets_are_drawn_again(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    words = ["--max-thinking-tokens", "6", "--reasoning-tags", "=", ".", "--thinking-end", " 7."]
    done = treegen("eval", "gsm8k", "-L", "2", "-n", "3", *words, "-o", run)
    assert done.code == 0, done.err
    assert treegen("certify", run).code == 0
    file = run / "certificate.json"
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "6")
    assert done.code == 0 and "6 of 6 have the same tokens" in done.out, done.out


def test_honest_samples_part_at_near_ties_and_nowhere_else(repository: Path) -> None:
    """The example was drawn in float32; in bfloat16 the same seeds draw other tokens at times."""
    with RunDir.open(repository / "examples" / "run") as run:
        job = load_job_of(run, {"model": "demo", "dtype": "bfloat16"})
        prepared = render_prompts(job)
        wide = redraw_samples(run, prepared, Listener(), num=20, seed=1)
        assert wide.tolerance == 0.1 and wide.holds and wide.diverged and not wide.differing
        assert len(wide.diverged) <= wide.num_ties < wide.num_tokens / 50
        assert "more differ only at" in str(wide)
        narrow = redraw_samples(run, prepared, Listener(), num=20, seed=1, tolerance=1e-4)
        assert not narrow.holds and len(narrow.diverged) < len(wide.diverged)
        assert narrow.default_tolerance == wide.default_tolerance == 0.1
    many = replace(wide, num_ties=max_ties(wide.num_tokens) + 1)
    assert not many.holds and "at most 2% of the tokens" in str(many)


def test_random_numbers_are_those_of_the_sampler() -> None:
    rng = random.Random(3)
    pairs = [(rng.randrange(2**63), rng.randrange(10_000)) for _ in range(1000)]
    seeds, steps = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, steps).tolist() == [random_number(*pair) for pair in pairs]


class _RememberingNearTies(NearTies):
    """Draws equal branches once, because each edit of a sample below parts at the same places."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._drawn: dict[Any, dict[str, Any]] = {}
        self._near: dict[Any, list[int]] = {}

    def _draw(self, branches: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
        if new := [branch for branch in dict.fromkeys(branches) if branch not in self._drawn]:
            self._drawn |= zip(new, super()._draw(new), strict=True)
        return [self._drawn[branch] for branch in branches]

    def _list_near_tokens(self, drawn: Record, places: Sequence[int]) -> list[list[int]]:
        sample = drawn["problem_id"], drawn["sample_index"]
        keys = {at: (*sample, *drawn["tokens"][: at + 1]) for at in places}
        if new := [at for at in places if keys[at] not in self._near]:
            found = super()._list_near_tokens(drawn, new)
            self._near |= {keys[at]: near for at, near in zip(new, found, strict=True)}
        return [self._near[keys[at]] for at in places]


@pytest.fixture(scope="module")
def diverged(certified: Path) -> Iterator[tuple[NearTies, Record, Record]]:
    """A redraw, and the sample that it becomes if the other token of a near-tie is drawn."""
    with RunDir.open(certified / "run") as run:
        prepared = _record_tokens(render_prompts(load_job_of(run, {})))
        records = [*run.records()]
    with closing(LLM(str(certified / "model"), eager=True)) as llm, ExitStack() as kept:
        for request in prepared.plan.requests:
            kept.enter_context(llm.keep(Node(request.tokens.tolist())))
        ties = _RememberingNearTies(prepared, llm, 0.1)
        for drawn in records:
            tokens, key = drawn["tokens"], (drawn["problem_id"], drawn["sample_index"])
            for at in range(len(tokens) // 2):
                for other in ties._list_near_tokens(drawn, [at])[0]:
                    (sample,) = ties._draw([(key, (*tokens[:at], other))])
                    if sample["num_tokens"] > at + 12 and "answer is" in sample["text"]:
                        yield ties, drawn, sample
                        return
    raise AssertionError("no tokens nearly tie")


@pytest.mark.parametrize("names", [("tokens",), ()], ids=["tokens", "text"])
def test_tokens_after_a_near_tie_are_compared(
    diverged: tuple[NearTies, Record, Record], names: tuple[str, ...]
) -> None:
    ties, drawn, sample = diverged
    key = drawn["problem_id"], drawn["sample_index"]

    def follow(**edits: Any) -> NearTieResult:
        stored = {**sample, **edits}
        stored = {name: stored[name] for name in stored if name != "tokens" or name in names}
        return ties.follow({key: stored}, {key: drawn})[key]

    honest = follow()
    assert (honest.num_ties, honest.why) == (1, "") and honest.distance < 1e-3
    text, tokens = sample["text"], sample["tokens"]
    stops: list[Any] = ["", "The", 7, [1], {}]
    for edit in (
        {"text": text.replace("answer is", "answer is 1")},
        {"text": None},
        {"text": f"{text}."},
        {"logprob": sample["logprob"] - 2},
        {"logprob": "1"},
        {"num_tokens": len(tokens) + 1},
        {"finish_reason": "length"},
        {"seed": 1},
        *({"stop": stop} for stop in stops),
    ):
        assert follow(**edit).why, edit
    if not names:
        return
    decode = Detokenizer(ties._llm.tokenizer).text
    (prompt,) = (request.tokens for name, (request, _) in ties._requests.items() if name == key[0])
    found = 0
    for place in range(len(tokens) - 10, len(tokens) - 4):  # each with a text of the same tokens
        changed = [*tokens[:place], (tokens[place] + 1) % 300, *tokens[place + 1 :]]
        new = decode(prompt, changed).removesuffix(sample["stop"])
        found += bool(follow(tokens=changed, text=new).why)
    assert found >= 5  # one may be a near-tie after which nothing else changes
    lies: list[Any] = [[], [1.5], ["a"], [-1], [10**9], tokens[:-1], [[]] * len(tokens), "abc", {}]
    for lie in lies:
        assert follow(tokens=lie).why, lie


def test_near_ties_of_samples_with_a_minimum_length(
    diverged: tuple[NearTies, Record, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    ties, drawn, _ = diverged
    places = range(len(drawn["tokens"]))
    expected = NearTies._list_near_tokens(ties, drawn, places)
    request, params = ties._requests[drawn["problem_id"]]
    longer = request, replace(params, min_tokens=9)
    monkeypatch.setitem(ties._requests, drawn["problem_id"], longer)
    near = NearTies._list_near_tokens(ties, drawn, places)
    assert near[9:] == expected[9:]
    assert all(map(ties._ends.isdisjoint, near[:9]))


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_given_tokens_are_continued_with_the_seed(certified: Path, speculate: str | None) -> None:
    """Half of a sample is given to the sample of another seed, and all of it to a third one."""
    with RunDir.open(certified / "run") as run:
        prepared = _record_tokens(render_prompts(load_job_of(run, {})))
        records = [r for r in run.records() if r["problem_id"] == "0"]
    with closing(LLM(str(certified / "model"), eager=True, speculate=speculate)) as llm:
        ties = NearTies(prepared, llm, 1e-3)
        wholes = [(("0", r["sample_index"]), tuple(r["tokens"])) for r in records]
        halves = [(key, tokens[: len(tokens) // 2]) for key, tokens in wholes]
        for record, drawn in zip(records * 2, ties._draw(halves + wholes), strict=True):
            assert not compare_records(record, drawn, 1e-4)[0]
        swapped = [(a, b) for (a, _), (_, b) in pairwise(wholes)]
        for other, drawn in zip(records[1:], ties._draw(swapped), strict=True):
            assert not compare_records({**other, "seed": drawn["seed"]}, drawn, 1e-4)[0]
