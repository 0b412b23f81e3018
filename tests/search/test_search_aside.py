"""Functions in threads and batches over searches: nothing waits for them, no tree shows them."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from fakes import HistoryModel
from live_search import backend_of, run_of
from toy_search import hashed, start

from treegen.errors import InputError
from treegen.search.ask_tell import AskTell, SampleRequest
from treegen.search.budget import Budget
from treegen.search.evaluate import Evaluate, by_function
from treegen.search.event_loop import gather
from treegen.search.external_calls import BatchedFunction, Threads
from treegen.search.propose import sample_steps
from treegen.search.strategies.beam import dvts
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

Fn = Callable[[SearchNode], Awaitable[object]]


def results_of(fn: Fn, num: int = 4, budget: Budget | None = None) -> list[SearchResult]:
    # Without room, parts of a search would wait for other searches.
    backend = backend_of(HistoryModel(), max_rows=128, num_pages=4000, prefill_chunk=4000)
    with run_of(backend, fn, num, budget=budget) as run:
        return sorted(run, key=lambda result: int(result.name))


def by_dvts(evaluate: Evaluate) -> Fn:
    async def fn(root: SearchNode) -> SearchOutcome:
        propose = sample_steps(3, stop=(), max_tokens=2)
        return await dvts(root, propose, evaluate, lambda n: False, subtrees=3, depth=4)

    return fn


def worth(node: SearchNode) -> float:
    return random.Random(node.path_text).random()


def shown(results: Sequence[SearchResult]) -> list[dict[str, Any]]:
    records = [result.to_json() for result in results]
    for record in records:
        assert record["error"] is None
        del record["usage"]["seconds"]
    return records


@pytest.mark.parametrize("budget", [None, Budget(nodes=20)])
def test_trees_do_not_depend_on_how_long_a_function_takes(budget: Budget | None) -> None:
    found = []
    for seed, threads in enumerate((0, 1, 3, 1)):
        rng = random.Random(seed)

        def slow(node: SearchNode, rng: random.Random = rng) -> float:
            time.sleep(rng.choice([0, 0, 0.0005, 0.002]))
            return worth(node)

        evaluate = by_function(slow if threads else worth, threads=threads)
        found.append(shown(results_of(by_dvts(evaluate), budget=budget)))
    assert found[1] == found[2] == found[3]
    if budget is None:  # without a budget that cuts it short, nor on whether it runs in a thread
        assert found[0] == found[1]


def test_other_searches_go_on_meanwhile() -> None:
    others_ended = threading.Event()
    ended: list[str] = []

    async def fn(root: SearchNode) -> object:
        if root.search.name == "0":
            tool = await root.run(others_ended.wait, 30)
            (child,) = await root.sample(1)
            return [child] if tool else None
        for _ in range(3):
            await root.sample(2)
        ended.append(root.search.name)
        if len(ended) == 3:
            others_ended.set()
        return None

    results = results_of(fn)
    assert results[0].best is not None and all(result.error is None for result in results)


def test_answers_come_when_nothing_of_the_search_is_under_way() -> None:
    async def fn(root: SearchNode) -> object:
        order: list[str] = []

        async def tool(name: str, seconds: float) -> None:
            await root.run(time.sleep, seconds)
            order.append(name)

        async def samples() -> None:
            for _ in range(3):
                await root.sample(1, max_tokens=4)
                order.append("sample")

        await gather([tool("slow", 0.01), tool("fast", 0), samples()])
        return order

    for result in results_of(fn, 3):
        assert result.value == ["sample"] * 3 + ["slow", "fast"]


def test_errors_and_budgets_of_functions_are_those_of_their_search() -> None:
    never = threading.Event()

    def fails() -> None:
        raise ValueError("no such tool")

    async def fn(root: SearchNode) -> object:
        if root.search.name == "0":
            await root.run(fails)
        if root.search.name == "1":
            await root.run(never.wait, 20)
        return "done"

    try:
        results = results_of(fn, 3, Budget(seconds=0.3))
    finally:
        never.set()
    assert re.fullmatch(
        r"ValueError: no such tool \(test_search_aside\.py:\d+, in \w+\)", results[0].error or ""
    )
    assert "0.3 seconds" in results[1].stopped and results[1].error is None
    assert results[2].value == "done"


def test_functions_are_called_anywhere_and_one_at_a_time() -> None:
    under_way, most = [0], [0]

    def counted(node: SearchNode) -> float:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.001)
        under_way[0] -= 1
        return worth(node)

    results_of(by_dvts(by_function(counted)), 4)
    assert most == [1]
    root = start(hashed("abc"))[0].root
    nodes = [root.extend(text) for text in "abc"]
    want = [worth(node) for node in nodes]
    for threads in (0, 1, 2):  # in a loop of one's own
        evaluate: Any = by_function(worth, threads=threads)
        assert asyncio.run(evaluate(nodes)) == want
    call = by_function(worth)(nodes)
    with pytest.raises(StopIteration) as stop:  # without a loop, as a session does
        call.send(None)  # type: ignore[attr-defined]
    assert stop.value.value == want
    pool = Threads(2)
    pool()
    assert isinstance(pickle.loads(pickle.dumps(pool)), Threads)
    for wrong in (-1, 1.5, True):
        with pytest.raises(InputError, match="threads"):
            by_function(worth, threads=wrong)  # type: ignore[arg-type]


def test_items_of_many_searches_are_computed_together() -> None:
    sizes: list[int] = []

    def compute(nodes: list[SearchNode]) -> list[float]:
        sizes.append(len(nodes))
        return [worth(node) for node in nodes]

    def search(together: BatchedFunction[SearchNode, float]) -> Fn:
        async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
            return await together(nodes[0], nodes)

        return by_dvts(evaluate)

    found = [shown(results_of(search(BatchedFunction(compute, size=64, patience=9**9)), 8))]
    num = sum(sizes)
    assert len(sizes) == 4 and num > 200  # each step of 8 searches in one go
    sizes.clear()
    found.append(shown(results_of(search(BatchedFunction(compute, size=1, patience=0)), 8)))
    assert sum(sizes) == num
    assert found[0] == found[1] == shown(results_of(by_dvts(by_function(worth, threads=0)), 8))


def test_only_the_search_whose_items_fail_fails() -> None:
    def compute(items: list[int]) -> list[int]:
        if 3 in items:
            raise ValueError("three")
        return [2 * item for item in items]

    together = BatchedFunction(compute)

    async def fn(root: SearchNode) -> object:
        return await together(root, [int(root.search.name), 7])

    results = results_of(fn, 6)
    assert [r.value for r in results if r.error is None] == [[2 * i, 14] for i in (0, 1, 2, 4, 5)]
    assert re.fullmatch(
        r"ValueError: three \(test_search_aside\.py:\d+, in \w+\)", results[3].error or ""
    )
    short: BatchedFunction[int, int] = BatchedFunction(lambda items: items[:-1])

    async def lacks(root: SearchNode) -> object:
        return await short(root, [1, 2])

    assert "the function returned 1 results for 2 items" in str(results_of(lacks, 1)[0].error)


def test_searches_of_ask_and_tell_use_both() -> None:
    sizes: list[int] = []

    def compute(texts: list[str]) -> list[int]:
        sizes.append(len(texts))
        return [len(text) for text in texts]

    together = BatchedFunction(compute)

    async def fn(root: SearchNode) -> object:
        (child,) = await root.sample(1)
        (length,) = await together(root, [child.text])
        return length + await root.run(len, child.text)

    with AskTell(fn, ["a", "b", "c"]) as searches:
        while requests := searches.ask():
            for request in requests:
                assert isinstance(request, SampleRequest)
                searches.tell(request, ["abcd"])
        assert [r.value for r in searches.results if r] == [8] * 3 and sizes == [3]


@pytest.mark.parametrize(("sharing", "passes"), [("all", 2), ("auto", 3)])
def test_questions_of_many_searches_are_computed_together(sharing: Any, passes: int) -> None:
    """Their trunk and what they are about, and then all questions with their answers."""

    async def fn(root: SearchNode) -> object:
        question = root.search.prompt("ac" * 7 + root.path[0].text[-1] * 9)
        return [score.logprob for score in await question.score(["d", "ef", "fe"])]

    backend = backend_of(HistoryModel(), max_rows=128, prefill_chunk=4000, sharing=sharing)
    with run_of(backend, fn, 8) as run:
        together = {result.name: result.value for result in run}
        assert backend.usage.prefill_steps == passes
    alone = {}
    backend = backend_of(HistoryModel(), sharing="off")
    with run_of(backend, fn, 8, concurrency=1) as run:
        alone = {result.name: result.value for result in run}
    assert together == alone
