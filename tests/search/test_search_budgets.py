"""A budget may end a search anywhere; what was drawn by then is in the tree, and in the result."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_search import hashed, run, run_all, start

from treegen.common.params import SamplingParams
from treegen.prompts.expansion import Expand
from treegen.search.budget import Budget, BudgetReached
from treegen.search.evaluate import mean_logprob, rollouts, value_prompt
from treegen.search.event_loop import gather
from treegen.search.propose import propose_lines, sample_step, sample_steps
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.expand import expand
from treegen.search.strategies.majority import majority
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.rebase import rebase
from treegen.search.strategies.tree_of_thoughts import best_first, bfs, dfs
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

MODEL = hashed("abc", eos=0.1)


def done(node: SearchNode) -> bool:
    return len(node.path_text) >= 4


STEPS = sample_steps(3, stop="c", max_tokens=3)
LISTED = propose_lines(
    lambda node: node.path_text + "b", lambda text, node: list(text), max_tokens=4
)
VALUE = value_prompt(lambda node: node.path_text + "a", len, n=2, max_tokens=3)
PLAY = rollouts(2, done, mean_logprob, stop=(), max_tokens=4)
ALL: dict[str, Callable[[SearchNode], Awaitable[SearchOutcome]]] = {
    "best_of_n": lambda root: best_of_n(root, 6, mean_logprob, max_tokens=4),
    "best_of_n by prompt": lambda root: best_of_n(root, 6, VALUE, max_tokens=4),
    "majority": lambda root: majority(root, lambda node: node.text[:1] or None, max_tokens=5),
    "beam": lambda root: beam(root, STEPS, mean_logprob, done, width=3, depth=4),
    "beam by prompt": lambda root: beam(root, STEPS, VALUE, done, width=3, depth=4),
    "beam with rollouts": lambda root: beam(root, STEPS, PLAY, done, width=2, depth=3),
    "bfs": lambda root: bfs(root, LISTED, VALUE, done, breadth=2, depth=4, solutions=None),
    "dfs": lambda root: dfs(root, STEPS, VALUE, done, depth=4, prune_below=1.0, solutions=3),
    "best_first": lambda root: best_first(root, STEPS, mean_logprob, done, batch=2, solutions=4),
    "mcts": lambda root: mcts(root, STEPS, PLAY, done, iterations=15),
    "dvts": lambda root: dvts(root, STEPS, VALUE, done, subtrees=3, depth=4),
    "rebase": lambda root: rebase(
        root, sample_step("c", max_tokens=3), mean_logprob, done, width=6, depth=4
    ),
    "expand": lambda root: expand(
        root, [Expand(3, stop="c", keep=2), Expand(2, max_tokens=2), Expand(2, prefix="a")]
    ),
}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["tokens", "calls", "nodes"]),
    limit=st.integers(1, 60),
    seed=st.integers(0, 2**62),
)
def test_nothing_drawn_is_lost(
    name: str, kind: Literal["tokens", "calls", "nodes"], limit: int, seed: int
) -> None:
    params = SamplingParams(max_tokens=5, seed=seed)
    search, backend = start(MODEL, params=params, budget=Budget(**{kind: limit}))
    result = run(search, ALL[name])
    assert result.error is None

    # Samples of prompts of their own have keys with an @ and are no part of the tree. Those that
    # a vote did not need are taken out again.
    drawn = {f"{key}{index}/" for key, index in backend.drawn if "@" not in key}
    in_tree = {node.key for node in search.nodes() if node.completion is not None}
    assert in_tree == drawn or (name == "majority" and result.stopped == "agreement")

    if search.stopped is not None:
        assert str(search.stopped) == f"budget of {limit} {kind} reached"
        if result.stopped != str(search.stopped):  # The last of it was the last of the budget.
            free = run(start(MODEL, params=params)[0], ALL[name])
            assert (result.tree, result.best, result.stopped) == (free.tree, free.best, "")
    spent = {"tokens": result.usage.tokens_decoded, "calls": result.usage.calls}
    if kind in spent:
        assert spent[kind] <= limit
    leaves = [n for n in search.nodes() if n.is_leaf and not n.pruned and n is not search.root]
    assert (result.best is not None) == bool(leaves)
    if name not in ("majority", "best_of_n", "best_of_n by prompt", "expand"):
        finished = {node.key for node in leaves if done(node)}
        assert {search.nodes()[index].key for index in result.candidates} == finished
    assert all(not node.pruned for node in result.tree.nodes if node.id in result.candidates)


@pytest.mark.parametrize("name", ALL)
def test_a_large_budget_changes_nothing(name: str) -> None:
    params = SamplingParams(max_tokens=5)
    free = run(start(MODEL, params=params)[0], ALL[name])
    held = run(start(MODEL, params=params, budget=Budget(tokens=10**6, calls=10**5))[0], ALL[name])
    assert free.tree == held.tree and free.best == held.best and free.stopped == held.stopped


@pytest.mark.parametrize("name", ALL)
def test_stopping_a_search_ends_it_with_what_it_has(name: str) -> None:
    search, _ = start(MODEL, params=SamplingParams(max_tokens=5))

    async def fn(root: SearchNode) -> SearchOutcome:
        search.stop("enough of it")
        return await ALL[name](root)

    result = run(search, fn)
    assert result.stopped == "enough of it" and result.best is None and result.error is None


# What each limit holds


async def eager(root: SearchNode) -> None:
    await gather(root.sample(16, max_tokens=3) for _ in range(3))


async def listing(root: SearchNode) -> None:
    for letter in "abcabcabc":
        (await root.sample(1))[0].extend(letter)


async def streaming(root: SearchNode) -> None:
    async with aclosing(root.stream(20)) as children:
        async for child in children:
            child.value = 1.0


@pytest.mark.parametrize("fn", [eager, listing, streaming])
@pytest.mark.parametrize("limit", [1, 5, 17])
def test_no_node_is_made_beyond_the_budget(
    fn: Callable[[SearchNode], Awaitable[None]], limit: int
) -> None:
    search, backend = start(hashed("abc"), budget=Budget(nodes=limit))
    (result,) = run_all([search], fn)
    assert result.stopped == f"budget of {limit} nodes reached" and result.error is None
    assert len(result.tree.nodes) - 1 == result.usage.nodes == limit
    assert len(backend.drawn) <= limit
    with pytest.raises(BudgetReached, match=f"budget of {limit} nodes"):
        search.root.extend("a")


def test_a_stream_is_one_call() -> None:
    async def sampled(root: SearchNode) -> None:
        await root.sample(3)
        await root.sample(2)

    async def streamed(root: SearchNode) -> None:
        for n in (3, 2):
            async with aclosing(root.stream(n)) as children:
                async for _ in children:
                    pass

    found = []
    for fn in (sampled, streamed):
        search, _ = start(hashed("abc"), "a", budget=Budget(calls=1))
        (result,) = run_all([search], fn)
        assert result.stopped == "budget of 1 calls reached" and result.error is None
        found.append((result.tree, replace(result.usage, seconds=0.0)))
    assert found[0] == found[1]
    assert found[0][1].nodes == 3


def test_no_more_samples_are_begun_than_there_are_tokens_left() -> None:
    async def wide(root: SearchNode) -> None:
        await gather([root.sample(4), root.sample(1_000_000)])

    search, backend = start(hashed("abc", eos=0.5), budget=Budget(tokens=10))
    (result,) = run_all([search], wide)
    assert result.stopped == "budget of 10 tokens reached"
    assert result.usage.tokens_decoded == 10 and len(backend.drawn) <= 10


def test_what_is_cancelled_makes_room_again() -> None:
    async def fn(root: SearchNode) -> int:
        call = asyncio.ensure_future(root.sample(5))
        await asyncio.sleep(0)
        with pytest.raises(BudgetReached, match="5 nodes"):
            await root.sample(1)
        call.cancel()
        await asyncio.wait([call])
        return len(await root.sample(5, max_tokens=1))

    assert run(start(hashed("abc"), budget=Budget(nodes=5))[0], fn).value == 5


@pytest.mark.parametrize("tokens", [13, 50, 200])
def test_best_of_n_draws_as_many_as_its_budget_has_room_for(tokens: int) -> None:
    params = SamplingParams(max_tokens=12)
    model = hashed("abc", eos=0.1)
    search, backend = start(model, params=params, budget=Budget(tokens=tokens))
    result = run(search, lambda root: best_of_n(root, 400, mean_logprob))
    assert result.stopped == f"budget of {tokens} tokens reached"
    # Each of them was sure to end, and there is not room for another.
    assert tokens - 12 < result.usage.tokens_decoded <= tokens
    assert result.usage.tokens_decoded == sum(node.n_tokens for node in result.tree.nodes)
    assert len(result.candidates) == len(backend.drawn) >= tokens // 12
    assert all(node.score is not None for node in result.tree.nodes[1:])
    whole = run(start(model, params=params)[0], lambda root: best_of_n(root, 400, mean_logprob))
    count = len(result.tree.nodes)
    assert [node.text for node in whole.tree.nodes[:count]] == [n.text for n in result.tree.nodes]


def test_a_vote_draws_as_many_as_its_budget_has_room_for() -> None:
    params = SamplingParams(max_tokens=12)
    search, _ = start(hashed("abc"), params=params, budget=Budget(tokens=50))
    result = run(search, lambda root: majority(root, lambda node: node.text[:1], batch=40))
    assert result.stopped == "budget of 50 tokens reached" and len(result.candidates) == 4
