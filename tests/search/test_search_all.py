"""What holds for all strategies."""

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from toy_search import (
    MODEL,
    Strategy,
    at_length,
    find,
    hashed,
    moves,
    run,
    run_all,
    start,
)

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.search.evaluate import (
    mean_logprob,
    rollouts,
)
from treegen.search.propose import sample_step, sample_steps
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.rebase import rebase
from treegen.search.strategies.tree_of_thoughts import best_first, bfs, dfs
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

DONE = at_length(4)
STEPS = sample_steps(3, stop=(), max_tokens=1)
ALL: dict[str, Strategy] = {
    "best_of_n": lambda root: best_of_n(root, 6, mean_logprob, max_tokens=4),
    "beam": lambda root: beam(root, STEPS, mean_logprob, DONE, width=3, depth=4),
    "bfs": lambda root: bfs(root, STEPS, mean_logprob, DONE, breadth=3, depth=4),
    "dfs": lambda root: dfs(root, STEPS, mean_logprob, DONE, depth=4, prune_below=-1.2),
    "best_first": lambda root: best_first(root, STEPS, mean_logprob, DONE, batch=2),
    "mcts": lambda root: mcts(
        root, STEPS, rollouts(2, DONE, mean_logprob, stop=(), max_tokens=2), DONE, iterations=15
    ),
    "dvts": lambda root: dvts(root, STEPS, mean_logprob, DONE, subtrees=3, depth=4),
    "rebase": lambda root: rebase(
        root, sample_step(stop=(), max_tokens=1), mean_logprob, DONE, width=6, depth=4
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_tree_whatever_runs_beside_it(name: str) -> None:
    model = hashed("abc", eos=0.05)
    alone = run(start(model, "a", name="one")[0], ALL[name])
    for beside in (1, 6):
        others = [start(model, "b", name=f"other {i}")[0] for i in range(beside)]
        search = start(model, "a", name="one")[0]
        results = run_all([*others[: beside // 2], search, *others[beside // 2 :]], ALL[name])
        assert results[beside // 2].tree == alone.tree
        assert results[beside // 2].best == alone.best
    other_seed = start(model, "a", name="one", params=SamplingParams(seed=5))[0]
    assert run(other_seed, ALL[name]).tree != alone.tree


@pytest.mark.parametrize("name", ALL)
def test_a_failing_function_fails_its_search_alone_and_keeps_the_tree(name: str) -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        found = await ALL[name](root)
        if root.search.name == "bad":
            raise ValueError("no\nway")
        return found

    searches = [start(MODEL, name=each)[0] for each in ("good", "bad")]
    good, bad = run_all(searches, search)
    assert good.error is None and good.best is not None
    assert re.fullmatch(r"ValueError: no way \(test_search_all\.py:\d+, in \w+\)", bad.error or "")
    assert len(bad.tree.nodes) > 1 and bad.best is None


@pytest.mark.parametrize("name", [name for name in ALL if name != "best_of_n"])
def test_a_root_without_next_steps_finds_nothing(name: str) -> None:
    async def nothing(node: SearchNode, n: int = 1) -> list[SearchNode]:
        return []

    strategies: dict[str, Any] = {
        "beam": lambda root: beam(root, nothing, mean_logprob, DONE, width=2, depth=2),
        "bfs": lambda root: bfs(root, nothing, mean_logprob, DONE, breadth=2, depth=2),
        "dfs": lambda root: dfs(root, nothing, mean_logprob, DONE, depth=2),
        "best_first": lambda root: best_first(root, nothing, mean_logprob, DONE),
        "mcts": lambda root: mcts(root, nothing, mean_logprob, DONE, iterations=3),
        "dvts": lambda root: dvts(root, nothing, mean_logprob, DONE, subtrees=2, depth=2),
        "rebase": lambda root: rebase(root, nothing, mean_logprob, DONE, width=2, depth=2),
    }
    assert find(strategies[name]) == SearchOutcome(None)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "3"])
def test_counts_are_checked(bad: Any) -> None:
    for call in (
        lambda root: beam(root, STEPS, mean_logprob, DONE, width=bad, depth=2),
        lambda root: bfs(root, STEPS, mean_logprob, DONE, breadth=2, depth=bad),
        lambda root: dfs(root, STEPS, mean_logprob, DONE, depth=2, max_visits=bad),
        lambda root: best_of_n(root, bad, mean_logprob),
        lambda root: mcts(root, STEPS, mean_logprob, DONE, iterations=bad),
    ):
        with pytest.raises(InputError, match=r"must be an integer|must be at least 1"):
            find(call)


@pytest.mark.parametrize("values", [[1.0], [1.0, math.nan], [math.inf, 0.0], []])
def test_evaluations_that_are_no_numbers_are_refused(values: list[float]) -> None:
    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        return values

    with pytest.raises(InputError, match="evaluate"):
        find(lambda root: beam(root, moves("ab"), evaluate, DONE, width=2, depth=2))


def test_cancelling_a_search_leaves_nothing_running() -> None:
    async def whole() -> None:
        search, _ = start(MODEL, params=SamplingParams(max_tokens=500))
        task = asyncio.ensure_future(ALL["dvts"](search.root))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
