"""What a budget cuts follows from the search alone, not from what had been decoded when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fakes import HistoryModel
from live_search import backend_of, pool_of, run_of

from treegen import LLM, SamplingParams
from treegen.engine import param_set
from treegen.search import AskTell, Budget, SearchNode, SearchResult
from treegen.search.evaluate import mean_logprob, rollouts, value_prompt
from treegen.search.event_loop import gather
from treegen.search.propose import propose_lines, sample_step, sample_steps
from treegen.search.session import Session
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.majority import majority
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.rebase import rebase
from treegen.search.strategies.tree_of_thoughts import best_first, bfs, dfs


def done(node: SearchNode) -> bool:
    return len(node.path_text) >= 9


STEPS = sample_steps(3, stop="c", max_tokens=5)
LISTED = propose_lines(
    lambda node: node.path_text + "b", lambda text, node: [text[:3], text[3:]], max_tokens=6
)
VALUE = value_prompt(lambda node: node.path_text + "a", len, n=3, max_tokens=7)
PLAY = rollouts(2, done, mean_logprob, stop="d", max_tokens=4)


async def chains(root: SearchNode) -> None:
    """Parts side by side that go on at their own pace, as agents with tools do."""

    async def part(number: int) -> None:
        node, rng = root, random.Random(number)
        for _ in range(6):
            children = await node.sample(rng.randint(1, 4), max_tokens=rng.randint(1, 9))
            node = children[-1].extend("ab")
            if rng.random() < 0.4:
                await node.score(["ac", "d"])
            if rng.random() < 0.3:
                await node.run(len, "a tool")

    await gather(map(part, range(5)))


async def left_early(root: SearchNode) -> None:
    """Streams that are left, whose cancelled samples had come to anywhere."""
    node = root
    while True:
        async with aclosing(node.stream(4, max_tokens=12)) as drawn:
            async for child in drawn:
                node = child
                if len(child.text) > 5:
                    break


async def given_up(root: SearchNode) -> None:
    """Calls that are cancelled while others go on."""
    while True:
        late = asyncio.ensure_future(root.sample(3, max_tokens=9))
        try:
            await root.sample(2, max_tokens=4)
        finally:
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)


ALL: dict[str, Callable[[SearchNode], Awaitable[object]]] = {
    "best_of_n": lambda root: best_of_n(root, 9, VALUE, max_tokens=7),
    "majority": lambda root: majority(root, lambda node: node.text[:1] or None, batch=6),
    "beam": lambda root: beam(root, STEPS, VALUE, done, width=3, depth=4),
    "bfs": lambda root: bfs(root, LISTED, VALUE, done, breadth=2, depth=4, solutions=None),
    "dfs": lambda root: dfs(root, STEPS, VALUE, done, depth=4, solutions=3),
    "best_first": lambda root: best_first(root, STEPS, VALUE, done, batch=3, solutions=4),
    "mcts": lambda root: mcts(root, STEPS, PLAY, done, iterations=30, batch=4),
    "ab_mcts": lambda root: ab_mcts(
        root, sample_step("c", max_tokens=5), VALUE, done, iterations=20, batch=4, rule="a"
    ),
    "dvts": lambda root: dvts(root, STEPS, VALUE, done, subtrees=4, depth=4),
    "rebase": lambda root: rebase(
        root, sample_step("c", max_tokens=5), mean_logprob, done, width=6, depth=4
    ),
    "chains": chains,
    "left early": left_early,
    "given up": given_up,
}


def outcomes(results: list[SearchResult], *, tokens: bool = True) -> dict[str, object]:
    """What may not depend on the moment. tokens: whether those decoded are of it."""
    found: dict[str, object] = {}
    for each in results:
        assert each.error is None, each.error
        usage = each.usage
        cost = (usage.tokens_decoded if tokens else 0, usage.calls, usage.nodes)
        found[each.name] = (each.tree, each.best, each.candidates, each.stopped, cost)
    return found


KINDS = (("tokens",), ("calls",), ("nodes",), ("tokens", "calls", "nodes"))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 40), marks=pytest.mark.soak)])
def test_a_budget_cuts_at_the_same_place_whatever_else_is_computed(
    name: str, seed: int | range
) -> None:
    for each in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(f"{name} {each}")
        kinds = KINDS[each % 4] if each else KINDS[0]
        most = 150 if "tokens" in kinds or name not in ("left early", "given up") else 20
        limit = rng.randint(1, most)
        limits = {kind: limit if kind == "tokens" else max(1, limit // 3) for kind in kinds}
        budget, model = Budget(**limits), HistoryModel(eos_bias=0.0)
        wide = run_of(backend_of(model, max_rows=64, num_pages=2000), ALL[name], 2, budget=budget)
        backend = backend_of(
            model,
            max_rows=rng.choice([2, 3, 7, 256]),
            run_ahead=rng.random() < 0.5,
            num_pages=rng.choice([120, 1000]),
        )
        results = list(run_of(backend, ALL[name], 2, budget=budget, concurrency=rng.choice([1, 2])))
        tokens = "tokens" in kinds
        assert outcomes(results, tokens=tokens) == outcomes(list(wide), tokens=tokens)
        for result in results if tokens else ():
            assert result.usage.tokens_decoded <= limits["tokens"]
        assert pool_of(backend).num_used == 0


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_samples_within_a_budget_are_the_first_that_were_asked_for(rows: int) -> None:
    async def wide(root: SearchNode) -> None:
        await root.sample(12, max_tokens=20)

    model = HistoryModel(eos_bias=1.0)
    (free,) = run_of(backend_of(model), wide, 1)
    lengths = [node.n_tokens for node in free.tree.nodes[1:]]
    for tokens in (1, sum(lengths[:4]), sum(lengths[:4]) + 1, sum(lengths) - 1, sum(lengths)):
        (result,) = run_of(backend_of(model, max_rows=rows), wide, 1, budget=Budget(tokens=tokens))
        kept = sum(sum(lengths[: place + 1]) <= tokens for place in range(12))
        assert result.tree.nodes[1:] == free.tree.nodes[1 : kept + 1]
        assert result.usage.tokens_decoded == min(tokens, sum(lengths))
        assert result.stopped == ("" if kept == 12 else f"budget of {tokens} tokens reached")


def test_calls_of_a_session_share_a_budget_in_their_order() -> None:
    model = HistoryModel(eos_bias=-9.0)
    for rows in (1, 5, 64):
        with Session(backend_of(model, max_rows=rows), SamplingParams(seed=3)) as session:
            root = session.root("acde", name="a", budget=Budget(tokens=50))
            first = session.start(root.sample(4, max_tokens=9))
            second = session.start(root.sample(4, max_tokens=9))
            done: list[Any] = []
            while len(done) < 2:
                done += session.step()
            assert done == [first, second] and len(first.result) == 4
            assert str(second.error) == "budget of 50 tokens reached"
            assert len(root.children) == 5 and root.search.usage.tokens_decoded == 50


def test_samples_that_wait_for_the_budget_keep_their_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until they start, nothing in the run uses their parameters, whose index may be reused."""
    stops = "bcdefghijklmnopq"

    async def fn(root: SearchNode) -> None:
        await gather(root.sample(2, stop=stop, max_tokens=12) for stop in stops)

    trees = []
    for capacity in (256, 1):
        monkeypatch.setattr(param_set, "_MIN_CAPACITY", capacity)
        (result,) = run_of(backend_of(HistoryModel()), fn, 1, budget=Budget(tokens=240))
        trees.append([node.text for node in result.tree.nodes])
    assert trees[0] == trees[1] and len(trees[0]) > 12


def test_answers_count_in_the_order_in_which_they_were_asked_for() -> None:
    async def fn(root: SearchNode) -> None:
        await gather(root.sample(2, max_tokens=5) for _ in range(4))

    trees = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        searches = AskTell(fn, ["a"], budget=Budget(tokens=9), count_tokens=len)
        requests = searches.ask()
        for place in order:
            if searches.is_wanted(requests[place]):
                searches.tell(requests[place], [f"{place}abc"[:3], f"{place}d"])
            assert not [each for each in searches.ask() if each not in requests]
        (result,) = searches.results
        assert result is not None and result.stopped == "budget of 9 tokens reached"
        assert [node.text for node in result.tree.nodes[1:]] == ["0ab", "0d", "1ab", "1d"]
        trees.append((result.tree, result.usage.tokens_decoded))
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("name", ["mcts", "dvts", "chains"])
def test_trees_of_a_real_model_are_the_same_at_any_width(name: str, checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=5)
    prompts = [f"Q: Bob has {i} pens and {i % 3} caps. How many?\nA:" for i in range(4)]
    found = []
    for options in (
        {"max_rows": 256},
        {"max_rows": 2},
        {"max_rows": 5, "run_ahead": True},
        {"max_rows": 16, "speculate": "ngram", "run_ahead": True},
    ):
        llm = LLM(str(checkpoint), check=False, device="cpu", memory="8MiB", **options)
        results = llm.search(ALL[name], prompts, params, budget=Budget(tokens=40))
        assert all(each.usage.tokens_decoded <= 40 for each in results)
        assert any("budget" in each.stopped for each in results)
        found.append(outcomes(results))
    for each in found[1:]:
        assert each == found[0]
