"""Where visits and children go: Monte Carlo tree search, DVTS and REBASE."""

import math
import random
from collections.abc import Callable

import pytest
from toy_search import (
    MODEL,
    ToyModel,
    at_length,
    find,
    moves,
    run,
    start,
    table,
)

from treegen.search.evaluate import (
    by_function,
    rollouts,
    sum_logprob,
)
from treegen.search.propose import sample_steps
from treegen.search.strategies.beam import dvts
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.node_statistics import NodeStatistics
from treegen.search.strategies.rebase import allocate, rebase
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

# Monte Carlo tree search


class SlowMcts:
    """UCT over texts, written the obvious way."""

    def __init__(self, letters: str, depth: int, c: float, worth: Callable[[str], float]) -> None:
        self.letters, self.depth, self.c, self.worth = letters, depth, c, worth
        self.visits: dict[str, int] = {"": 0}
        self.total: dict[str, float] = {"": 0.0}
        self.expanded: set[str] = set()

    def iterate(self) -> None:
        path = [""]
        while len(path[-1]) < self.depth:
            text = path[-1]
            if text not in self.expanded:
                if text and not self.visits[text]:
                    break
                self.expanded.add(text)
                for letter in self.letters:
                    self.visits[text + letter], self.total[text + letter] = 0, 0.0
            path.append(max((text + letter for letter in self.letters), key=self.bound))
        for text in path:
            self.visits[text] += 1
            self.total[text] += self.worth(path[-1])

    def bound(self, text: str) -> float:
        if self.visits[text] == 0:
            return math.inf
        mean = self.total[text] / self.visits[text]
        return mean + self.c * math.sqrt(math.log(self.visits[text[:-1]]) / self.visits[text])


@pytest.mark.parametrize("c", [0.1, 1.4, 5.0])
@pytest.mark.parametrize("letters", ["a", "abc"])
def test_mcts_visits_what_the_formula_says(c: float, letters: str) -> None:
    salt = random.random()

    def worth(text: str) -> float:
        return random.Random(f"{salt}{text}").random()

    slow = SlowMcts(letters, 4, c, worth)
    for _ in range(60):
        slow.iterate()
    statistics: dict[SearchNode, NodeStatistics] = {}

    async def search(root: SearchNode) -> SearchOutcome:
        return await mcts(
            root,
            moves(letters),
            by_function(lambda node: worth(node.path_text)),
            at_length(4),
            iterations=60,
            c=c,
            statistics=statistics,
        )

    find(search)
    assert {node.path_text: arm.visits for node, arm in statistics.items()} == slow.visits
    for node, arm in statistics.items():
        assert arm.total == pytest.approx(slow.total[node.path_text])
        # A solution that was made but never visited is valued in the end.
        value = arm.mean if arm.visits else worth(node.path_text)
        if arm.visits or len(node.path_text) == 4:
            assert node.value == pytest.approx(value)
        else:
            assert node.value is None


def test_mcts_converges_to_the_best_arm() -> None:
    """Rewards are wins of samples; the arms win with the chances that the model gives."""
    chance = {"a": 0.3, "b": 0.8, "c": 0.5}

    def weights(text: str) -> list[float]:
        # After a first letter x, "a" follows with the arm's chance and is a win.
        win = chance.get(text[:1], 0.5)
        return [0.0, win, 1 - win, 0.0]

    statistics: dict[SearchNode, NodeStatistics] = {}

    def done(node: SearchNode) -> bool:
        return len(node.path_text) == 2

    async def search(root: SearchNode) -> SearchOutcome:
        won = by_function(lambda node: node.path_text.endswith("a"))
        play = rollouts(1, done, won, stop=(), max_tokens=1)
        return await mcts(
            root, moves("abc"), play, done, iterations=400, depth=1, statistics=statistics
        )

    find(search, ToyModel("abc", weights))
    first = {node.text: arm for node, arm in statistics.items() if node.depth == 1}
    assert first["b"].visits == max(arm.visits for arm in first.values()) > 200
    assert first["b"].mean == pytest.approx(0.8, abs=0.15)
    assert sum(arm.visits for arm in first.values()) == 400


def test_mcts_prunes_dead_ends_and_ends_when_nothing_is_left() -> None:
    async def propose(node: SearchNode) -> list[SearchNode]:
        return [node.extend(letter) for letter in {"": "ab", "a": "ab"}.get(node.path_text, "")]

    search, _ = start(MODEL)
    result = run(
        search, lambda root: mcts(root, propose, table({"a": 1}), lambda _: False, iterations=99)
    )
    assert [node.pruned for node in result.tree.nodes] == [False, True, True, True, True]
    assert result.stopped == "" and result.candidates == ()


def test_mcts_ends_with_a_solution_that_is_good_enough() -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        worth = table({"b": 0.3, "ba": 1.0})
        return await mcts(root, moves("ab"), worth, at_length(2), iterations=500, target_value=1.0)

    found = find(search)
    assert found.best is not None and found.best.path_text == "ba"
    assert len(found.best.search.nodes()) < 20


# Diverse and reward-balanced trees


def test_dvts_grows_greedy_subtrees_apart_from_each_other() -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        steps = sample_steps(3, stop=(), max_tokens=2)
        return await dvts(root, steps, sum_logprob, at_length(6), subtrees=4, depth=3)

    found = find(search)
    assert len(found.candidates) == 4
    root = found.candidates[0].search.root
    assert len(root.children) == 12
    for index in range(4):
        group = root.children[3 * index : 3 * index + 3]
        best = max(group, key=lambda node: node.logprob)
        assert [node.pruned for node in group] == [node is not best for node in group]
        for node in best.walk():
            if node.children:
                kept = [child for child in node.children if not child.pruned]
                assert len(kept) == 1
                first = {child.text: child for child in node.children[::-1]}.values()
                assert kept[0] is max(first, key=lambda child: child.logprob)


def reference_shares(values: list[float], budget: int, temperature: float) -> list[float]:
    weights = [math.exp(value / temperature) for value in values]
    return [budget * weight / sum(weights) for weight in weights]


def test_allocation_adds_up_and_follows_the_values() -> None:
    rng = random.Random(1)
    for _ in range(300):
        values = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(rng.randint(1, 12))]
        budget, temperature = rng.randint(0, 40), rng.choice([0.05, 0.2, 1.0, 10.0])
        counts = allocate(values, budget, temperature)
        exact = reference_shares(values, budget, temperature)
        assert sum(counts) == budget
        assert all(n <= math.ceil(share - 1e-9) for n, share in zip(counts, exact, strict=True))
        ranked = sorted(zip(values, counts, strict=True), key=lambda pair: -pair[0])
        assert [n for _, n in ranked] == sorted(counts, reverse=True) or len(set(values)) < len(
            values
        )
        best = max(range(len(values)), key=lambda index: values[index])
        assert counts[best] == math.ceil(exact[best] - 1e-9)


@pytest.mark.parametrize(
    ("values", "budget", "temperature", "counts"),
    [
        ([0.5, 0.5], 4, 0.2, [2, 2]),
        ([0.0, 0.2], 8, 0.2, [2, 6]),  # weights 1 : e, exact shares 2.15 and 5.85
        ([1.0, 0.0, 0.0], 16, 0.01, [16, 0, 0]),
        ([0.1] * 5, 3, 0.2, [1, 1, 1, 0, 0]),
        ([-2000.0, -1.0], 5, 0.1, [0, 5]),
        ([], 5, 0.2, []),
        ([0.3], 0, 0.2, [0]),
    ],
)
def test_allocation_by_hand(
    values: list[float], budget: int, temperature: float, counts: list[int]
) -> None:
    assert allocate(values, budget, temperature) == counts


def test_rebase_draws_its_width_at_each_level() -> None:
    calls: list[tuple[str, int]] = []
    values = {"a": 0.6, "b": 0.5, "c": 0.1}

    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        calls.append((node.path_text, n))
        return [node.extend(letter) for letter in "abcdefghijkl"[:n]]

    async def search(root: SearchNode) -> SearchOutcome:
        return await rebase(root, step, table(values, 0.5), at_length(3), width=3, depth=3)

    found = find(search)
    counts = allocate([0.6, 0.5, 0.1], 3, 0.2)
    assert calls[0] == ("", 3)
    assert calls[1:3] == [(letter, n) for letter, n in zip("abc", counts, strict=True) if n]
    assert sum(n for text, n in calls if len(text) == 2) == 3
    assert len(found.candidates) == 3


def test_rebase_solutions_take_from_the_width() -> None:
    totals: dict[int, int] = {}

    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        totals[node.depth] = totals.get(node.depth, 0) + n
        return [node.extend(letter) for letter in "abcdefghijkl"[:n]]

    async def search(root: SearchNode) -> SearchOutcome:
        return await rebase(
            root,
            step,
            table({}, 0.5),
            lambda node: node.path_text.endswith("a") or node.depth == 4,
            width=8,
            depth=9,
            temperature=5.0,
        )

    found = find(search)
    assert totals[0] == 8 and totals[1] == 7 and len(found.candidates) == 8
