"""A budget may end a search anywhere; what was drawn by then is in the tree, and in the result."""

from collections.abc import Awaitable, Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_search import hashed, run, start

from treegen.expansion import Expand
from treegen.params import SamplingParams
from treegen.search.beam import beam
from treegen.search.best_first import best_first
from treegen.search.best_of_n import best_of_n
from treegen.search.budget import Budget
from treegen.search.dvts import dvts
from treegen.search.evaluate import mean_logprob, rollouts, value_prompt
from treegen.search.expand import expand
from treegen.search.majority import majority
from treegen.search.mcts import mcts
from treegen.search.node import SearchNode
from treegen.search.propose import propose_lines, sample_step, sample_steps
from treegen.search.rebase import rebase
from treegen.search.result import Found
from treegen.search.thoughts import bfs, dfs

MODEL = hashed("abc", eos=0.1)


def done(node: SearchNode) -> bool:
    return len(node.path_text) >= 4


STEPS = sample_steps(3, stop="c", max_tokens=3)
LISTED = propose_lines(
    lambda node: node.path_text + "b", lambda text, node: list(text), max_tokens=4
)
VALUE = value_prompt(lambda node: node.path_text + "a", len, n=2, max_tokens=3)
PLAY = rollouts(2, done, mean_logprob, stop=(), max_tokens=4)
ALL: dict[str, Callable[[SearchNode], Awaitable[Found]]] = {
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
        root, [Expand(3, stop="c", keep=2), Expand(2, max_tokens=2), Expand(2, given="a")]
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
        assert result.stopped == str(search.stopped) == f"budget of {limit} {kind} reached"
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

    async def fn(root: SearchNode) -> Found:
        search.stop("enough of it")
        return await ALL[name](root)

    result = run(search, fn)
    assert result.stopped == "enough of it" and result.best is None and result.error is None
