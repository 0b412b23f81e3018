"""Batches of visits are made to fit the budget: what begins together ends within it."""

from collections.abc import Awaitable, Callable, Sequence

import pytest
from toy_search import MODEL, at_length, run, start

from treegen.search.budget import Budget
from treegen.search.evaluate import by_function, rollouts
from treegen.search.propose import sample_step, sample_steps
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.strategies.common import Costs
from treegen.search.strategies.mcts import mcts
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

value = by_function(lambda node: (sum(map(ord, node.path_text)) % 97) / 97)
played = rollouts(2, at_length(12), value, stop=(), max_tokens=3)


async def by_mcts(root: SearchNode, batch: int = 8) -> SearchOutcome:
    steps = sample_steps(3, stop=(), max_tokens=3)
    return await mcts(root, steps, value, at_length(12), iterations=99, batch=batch)


async def by_ab_mcts(root: SearchNode) -> SearchOutcome:
    step = sample_step(stop=(), max_tokens=3)
    return await ab_mcts(root, step, value, at_length(12), iterations=99, batch=8)


def searched(
    fn: Callable[[SearchNode], Awaitable[SearchOutcome]], budget: Budget
) -> tuple[SearchResult, list[SearchNode]]:
    search, _ = start(MODEL, budget=budget)
    return run(search, fn), search.nodes()


@pytest.mark.parametrize("tokens", [72, 90, 117, 135])
@pytest.mark.parametrize("fn", [by_mcts, by_ab_mcts])
def test_no_token_goes_into_samples_that_cannot_end(
    fn: Callable[[SearchNode], Awaitable[SearchOutcome]], tokens: int
) -> None:
    # All steps have 3 tokens, and 3 of them are drawn together, so 9 divides what can be spent.
    result, nodes = searched(fn, Budget(tokens=tokens))
    in_tree = sum(len(node.tokens) for node in nodes)
    assert result.usage.tokens_decoded == in_tree == tokens
    assert result.stopped == f"budget of {tokens} tokens reached"


@pytest.mark.parametrize("budget", [Budget(tokens=72), Budget(calls=10), Budget(nodes=24)])
def test_room_is_kept_for_values(budget: Budget) -> None:
    valued: list[int] = []

    async def noted(nodes: Sequence[SearchNode]) -> Sequence[float]:
        values = await played(nodes)
        valued.append(len(nodes))
        return values

    async def search(root: SearchNode) -> SearchOutcome:
        steps = sample_steps(3, stop=(), max_tokens=3)
        return await mcts(root, steps, noted, at_length(12), iterations=99, batch=8)

    # Steps below one node cost 9 tokens, a value 6. Each is one call; they are 3 and 2 nodes. There
    # is room for the steps of the root and of its three children, for values of these three and of
    # three nodes below them.
    result, nodes = searched(search, budget)
    assert valued == [3, 3] and result.stopped
    usage = result.usage
    assert (usage.tokens_decoded, usage.calls, usage.nodes) == (4 * 9 + 6 * 6, 10, 24)
    assert sum(len(node.tokens) for node in nodes) == usage.tokens_decoded


def test_single_visits_are_not_held_back() -> None:
    result, _ = searched(lambda root: by_mcts(root, batch=1), Budget(tokens=40))
    assert result.usage.tokens_decoded == 40


def test_costs_are_means_of_each_kind() -> None:
    search, _ = start(MODEL, budget=Budget(tokens=20, calls=9))
    costs = Costs(search)

    async def spend(tokens: int, calls: int) -> str:
        search.usage.tokens_decoded += tokens
        search.usage.calls += calls
        return "spent"

    async def whole(root: SearchNode) -> None:
        assert costs.fits_budget(steps=10**6) and costs.most(5, "steps") == 5
        assert await costs.of("steps", 2, spend(6, 1)) == "spent"
        await costs.of("values", 1, spend(2, 2))
        # 8 of 20 tokens and 3 of 9 calls are gone. A step takes 3 and 1/2, a value 2 and 2.
        assert costs.fits_budget(steps=4) and not costs.fits_budget(steps=5)
        assert costs.fits_budget(steps=2, values=2) and not costs.fits_budget(steps=3, values=2)
        assert costs.fits_budget(values=3) and not costs.fits_budget(values=4)
        assert costs.most(9, "steps", "values") == 2 and costs.most(1, "steps") == 1
        await costs.of("steps", 1, spend(12, 0))
        assert costs.most(9, "steps") == 1

    run(search, whole)
