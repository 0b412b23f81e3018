"""Two workers give what one LLM gives: samples, scores and searches, also when a worker dies."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treegen import LLM, Cluster, Node, RunResult, SamplingParams
from treegen.common.outputs import Completion
from treegen.errors import CapacityError, InputError, ModelWarning, WorkerError
from treegen.search import SearchNode, SearchOutcome

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
OPTIONS: dict[str, Any] = {"memory": "4MiB", "max_rows": 8}
TREE = Node(
    "Solve it.\n",
    children=[Node(f"Question {i}?", id=f"q{i}", samples=5 + i % 3) for i in range(12)],
    samples=0,
)
PARAMS = SamplingParams(max_tokens=40, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), **OPTIONS)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RunResult:
    """The run of one engine."""
    return llm.run(TREE, PARAMS)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with Cluster(str(tiny), workers=2, **OPTIONS) as started:
        yield started


def _drawn(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """What does not depend on rounding."""
    return [
        (c.prompt_id, c.sample_index, c.seed, c.text, c.tokens, c.finish_reason, c.stop)
        for c in completions
    ]


def _send(cluster: Cluster, what: signal.Signals, number: int) -> None:
    loaded = cluster._pool.slots[number].loaded
    assert loaded is not None
    os.kill(loaded.pid, what)


def test_a_run_has_the_samples_of_one_engine_in_order(whole: RunResult, cluster: Cluster) -> None:
    one, many = whole, cluster.run(TREE, PARAMS)
    assert _drawn(many.completions) == _drawn(one.completions)
    for actual, expected in zip(many.completions, one.completions, strict=True):
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert many.plan.levels() == one.plan.levels()
    for name in ("prompt_tokens_unshared", "impl", "page_size"):
        assert getattr(many.usage, name) == getattr(one.usage, name)
    assert many.usage.num_pages == 2 * one.usage.num_pages
    # What a worker had begun may be given back, and is then drawn by another from its start.
    assert one.usage.decoded_tokens <= many.usage.decoded_tokens <= 2 * one.usage.decoded_tokens
    assert 0 < many.usage.peak_rows <= 2 * one.usage.peak_rows  # summed over workers
    # Each worker that has work computes what all prompts share once.
    assert one.usage.prompt_tokens_computed <= many.usage.prompt_tokens_computed
    assert many.usage.prompt_tokens_computed <= 2 * one.usage.prompt_tokens_computed


def test_both_workers_work_and_are_told_of(cluster: Cluster) -> None:
    with cluster.stream(TREE, PARAMS) as stream:
        found = list(stream)
        workers = stream.workers()
    assert len(found) == sum(node.samples or 0 for node in TREE.children)
    assert [worker.name for worker in workers] == ["worker 0", "worker 1"]
    assert sum(worker.tokens for worker in workers) == stream.usage.decoded_tokens
    assert all(worker.tokens > stream.usage.decoded_tokens / 4 for worker in workers)
    assert all(worker.num_pages and not worker.deaths for worker in workers)


def test_workers_have_as_much_of_the_cores_as_other_processes(cluster: Cluster) -> None:
    for slot in cluster._pool.slots:
        assert slot.loaded is not None
        assert os.getpriority(os.PRIO_PROCESS, slot.loaded.pid) == os.getpriority(
            os.PRIO_PROCESS, 0
        )


def test_what_is_skipped_is_not_drawn(llm: LLM, cluster: Cluster) -> None:
    skip = [("q0", 1), ("q3", 0), *(("q5", index) for index in range(7))]
    one, many = (sorted(_drawn(list(m.stream(TREE, PARAMS, skip=skip)))) for m in (llm, cluster))
    assert many == one


def test_greedy_samples_and_flat_prompts(llm: LLM, cluster: Cluster) -> None:
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    first, second = (_drawn(each.run(TREE, greedy).completions) for each in (llm, cluster))
    assert second == first
    prompts = ["One", "Two", "Three", "One"]
    params = [SamplingParams(n=n, max_tokens=9) for n in (2, 3, 1, 2)]
    for _ in range(2):  # the second call draws further samples
        one, many = llm.generate(prompts, params), cluster.generate(prompts, params)
        assert [_drawn(group) for group in many] == [_drawn(group) for group in one]
    assert cluster.generate([]) == []


def test_budgets_for_thinking_travel(llm: LLM, cluster: Cluster) -> None:
    params = SamplingParams(
        max_tokens=20,
        seed=1,
        reasoning_tags=("?", "ex"),
        max_thinking_tokens=5,
        thinking_end=" ex ",
    )
    one, many = llm.run(TREE, params).completions, cluster.run(TREE, params).completions
    assert _drawn(many) == _drawn(one)
    assert [c.thinking for c in many] == [c.thinking for c in one]
    assert any(c.thinking is not None and c.thinking.is_forced for c in many)


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "no_repeat_ngram_size": 3},
        {"prompt_logprobs": 3, "bad_words": ["e", "th"]},
        {"regex": "[a-e]{3,9}(yes|no)"},
        {"json_schema": {"type": "array", "items": {"type": "boolean"}}, "frequency_penalty": 0.3},
    ],
)
def test_penalties_grammars_and_alternatives_travel(
    llm: LLM, cluster: Cluster, how: dict[str, Any]
) -> None:
    if "regex" in how or "json_schema" in how:
        pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=24, seed=2, **how)
    one, many = llm.run(TREE, params).completions, cluster.run(TREE, params).completions
    assert _drawn(many) == _drawn(one)
    for actual, expected in zip(many, one, strict=True):
        assert (actual.prompt_logprobs is None) == ("prompt_logprobs" not in how)
        if actual.prompt_logprobs is None or expected.prompt_logprobs is None:
            continue
        scores, expected_scores = actual.prompt_logprobs.top, expected.prompt_logprobs.top
        assert scores is not None and expected_scores is not None
        np.testing.assert_allclose(scores.logprobs, expected_scores.logprobs, atol=1e-5)


def test_scores_come_in_the_order_of_the_pairs(llm: LLM, cluster: Cluster) -> None:
    pairs = [(f"The word {i // 3} is", f" {'very ' * (i % 3)}long") for i in range(20)]
    for one, many in zip(llm.score(pairs, top=3), cluster.score(pairs, top=3), strict=True):
        assert many.tokens == one.tokens and many.is_greedy == one.is_greedy
        assert many.logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert many.top is not None and one.top is not None
        np.testing.assert_allclose(many.top.logprobs, one.top.logprobs, atol=1e-5)
    with cluster.score_stream(pairs) as stream:
        assert sorted(index for index, _ in stream) == list(range(20))


async def _two_steps(root: SearchNode) -> SearchOutcome:
    first = await root.sample(3, max_tokens=5)
    second = await first[len(root.search.name) % 3].sample(2, max_tokens=4)
    return SearchOutcome(second[0], tuple(second))


def test_searches_grow_the_same_trees(llm: LLM, cluster: Cluster) -> None:
    problems = ["Go", "Stop", ("named", "Go"), "Go"]
    for _ in range(2):
        one, many = llm.search(_two_steps, problems), cluster.search(_two_steps, problems)
        for actual, expected in zip(many, one, strict=True):
            assert actual.error is None and actual.name == expected.name
            assert [n.text for n in actual.tree.nodes] == [n.text for n in expected.tree.nodes]
            assert actual.best_text == expected.best_text


async def _fails(root: SearchNode) -> SearchOutcome:
    if root.search.name == "bad":
        raise ValueError("no way")
    return SearchOutcome(None)


def test_a_search_that_fails_fails_alone(cluster: Cluster) -> None:
    good, bad = cluster.search(_fails, [("good", "a"), ("bad", "b")])
    assert good.error is None and bad.error is not None and "no way" in bad.error
    with pytest.warns(
        RuntimeWarning, match=r"search failed.*no way \(test_cluster\.py:\d+, in \w+\)$"
    ):  # it has no exception
        cluster.search(_fails, [("bad", "b")])


async def _returns_a_lock(root: SearchNode) -> object:
    node = (await root.sample(1, max_tokens=2))[0]
    return threading.Lock() if root.search.name == "bad" else node


def test_a_search_that_returns_what_cannot_be_sent_fails_alone(cluster: Cluster) -> None:
    lives = [slot.num_processes for slot in cluster._pool.slots]
    good, bad = cluster.search(_returns_a_lock, [("good", "a"), ("bad", "b")])
    assert good.error is None and good.best == 1
    assert bad.error is not None and "returned value cannot be pickled (TypeError" in bad.error
    assert bad.value is None and len(bad.tree.nodes) == 2
    assert [slot.num_processes for slot in cluster._pool.slots] == lives


def test_if_all_workers_are_given_up_each_call_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in cluster._pool.slots:
        monkeypatch.setattr(slot, "over", True)
        monkeypatch.setattr(slot, "reason", "its process died")
    message = r"no worker is left \(worker 0: its process died; worker 1: its process died\)"
    for call in (lambda: cluster.run(TREE, PARAMS), lambda: cluster.search(_fails, ["a"])):
        with pytest.raises(WorkerError, match=message):
            call()


def test_a_stream_that_is_left_is_over(cluster: Cluster) -> None:
    stream = cluster.stream(TREE, PARAMS)
    next(stream)
    with pytest.raises(InputError, match="not finished"):
        cluster.run(TREE, PARAMS)
    stream.close()
    assert not stream.has_work
    assert len(cluster.run(TREE, PARAMS).completions) == 72


def test_bad_input_is_told_as_by_one_engine(cluster: Cluster) -> None:
    with pytest.raises(CapacityError, match="more than fit into the model's context"):
        cluster.run(Node("word " * 9000, samples=1))
    with pytest.raises(InputError, match="logit_bias contains token"):
        cluster.run(TREE, SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(InputError, match="a reasoning budget requires reasoning tags"):
        cluster.run(TREE, SamplingParams(max_thinking_tokens=3))
    for name in (
        "cache",
        "model",
        "open_live_run",
        "open_planned_stream",
        "session",
        "keep",
        "list_prefixes",
    ):
        with pytest.raises(
            AttributeError, match=f"no {name}, because {name} belongs to a single model; use an LLM"
        ):
            getattr(cluster, name)


def test_a_worker_that_is_killed_gives_back_what_it_had(whole: RunResult, cluster: Cluster) -> None:
    found: list[Completion] = []
    with cluster.stream(TREE, PARAMS) as stream:
        found += stream.step()
        _send(cluster, signal.SIGKILL, 0)
        while stream.has_work:
            found += stream.step()
        workers = stream.workers()
    assert sorted(_drawn(found)) == sorted(_drawn(whole.completions))
    assert [worker.deaths for worker in workers] == [1, 0]


def test_a_worker_that_hangs_is_taken_for_dead(
    whole: RunResult, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Completion] = []
    monkeypatch.setattr("treegen.llm.cluster.worker_pool.PATIENCE", 8.0)
    before = cluster._pool.slots[1].num_processes
    with cluster.stream(TREE, PARAMS) as stream:
        found += stream.step()
        _send(cluster, signal.SIGSTOP, 1)
        while stream.has_work:
            found += stream.step()
    assert sorted(_drawn(found)) == sorted(_drawn(whole.completions))
    assert cluster._pool.slots[1].num_processes > before


async def _breaks(root: SearchNode) -> SearchOutcome:
    await root.sample(1, max_tokens=2)
    if root.search.name == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return SearchOutcome(None)


@pytest.mark.soak
def test_a_problem_that_breaks_workers_is_reported_and_left_out(cluster: Cluster) -> None:
    problems = [(name, "Go") for name in ("a", "b", "bad", "c", "d", "e")]
    with pytest.warns(ModelWarning, match="'bad' is left out: it crashed workers 3 times"):
        results = cluster.search(_breaks, problems)
    assert [result.name for result in results if result.error] == ["bad"]
    assert results[2].stopped == "left out"
    # The cluster goes on after that.
    assert len(cluster.run(TREE, PARAMS).completions) == 72


def test_what_is_dealt_while_a_run_goes_on_is_drawn_as_by_one_engine(
    llm: LLM, cluster: Cluster
) -> None:
    params = replace(PARAMS, logprobs=0, confidence=20, confidence_window=5)
    whole = {(c.prompt_id, c.sample_index): c for c in llm.run(TREE, params).completions}
    lows = [
        min((sum(c.confidences[i : i + 5]) / 5 for i in range(c.num_tokens - 4)), default=9.0)
        for c in whole.values()
    ]
    floor = sorted(lows)[len(lows) // 2] + 1e-4
    found: list[Completion] = []
    with cluster.open_stream(TREE, params) as stream:
        stream.add_work([(place, [0, 1]) for place in range(12)])
        while stream.has_work:
            found += stream.step()
        rest = {place: range(2, r.samples) for place, r in enumerate(stream.plan.requests)}
        stream.add_work([(p, list(r)) for p, r in rest.items()], dict.fromkeys(range(6), floor))
        while stream.has_work:
            found += stream.step()
    assert sorted(whole) == sorted((c.prompt_id, c.sample_index) for c in found)
    for c in found:
        other = whole[c.prompt_id, c.sample_index]
        assert c.tokens == other.tokens[: c.num_tokens]
        values = np.array(c.confidences)
        means = np.array([values[i : i + 5].mean() for i in range(len(values) - 4)])
        has_floor = c.sample_index >= 2 and int(c.prompt_id[1:]) < 6
        if c.finish_reason == "confidence":
            assert has_floor and means[-1] < floor + 1e-6 and (means[:-1] > floor - 1e-6).all()
        elif has_floor:
            assert (means[:-1] > floor - 1e-6).all()
    assert {c.finish_reason for c in found} >= {"confidence"}
