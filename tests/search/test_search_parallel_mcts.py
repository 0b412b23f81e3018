"""Monte Carlo tree search with several visits at once, its rules and its priors."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from toy_search import MODEL, at_length, find, hashed, moves, run, start, table

from treegen.errors import InputError
from treegen.search.evaluate import by_function, rollouts
from treegen.search.propose import sample_steps
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.node_statistics import MCTSRules, NodeStatistics, likelihood_priors
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


class SlowTree:
    """Parallel tree search over texts, written the obvious way.

    A batch chooses its visits one after another. Each adds one to the numbers of the texts on its
    way. With a virtual loss these count with value 0, otherwise they count in the numbers alone.
    """

    def __init__(
        self,
        letters: str,
        depth: int,
        c: float,
        worth: Callable[[str], float],
        rules: MCTSRules,
        prior: Callable[[str], float] | None,
    ) -> None:
        self.letters, self.depth, self.c, self.worth, self.rules = letters, depth, c, worth, rules
        self.prior = prior
        self.rewards: dict[str, list[float]] = {"": []}
        self.under_way: dict[str, int] = {"": 0}
        self.batches: list[list[str]] = []

    def run(self, iterations: int, batch: int) -> None:
        while iterations:
            chosen = self.choose(min(batch, iterations))
            self.batches.append(chosen)
            iterations -= len(chosen)
            for text in chosen:
                for length in range(len(text) + 1):
                    self.under_way[text[:length]] = 0
                    # The values of the texts on the way, from this one on; "" has none.
                    values = [self.worth(text[:to]) for to in range(max(length, 1), len(text) + 1)]
                    self.rewards[text[:length]].append(self.combine(values))

    def combine(self, values: list[float]) -> float:
        if self.rules.reward == "leaf":
            return values[-1]
        if self.rules.reward == "mean":
            return sum(values) / len(values)
        if self.rules.reward == "sum":
            return sum(values)
        if self.rules.reward == "product":
            return math.prod(values)
        return min(values)

    def choose(self, most: int) -> list[str]:
        """First all visits go down as far as the tree goes; where it ends, it grows; then they go
        on, again one after another."""
        places = [""] * most
        while True:
            for text in self.under_way:
                self.under_way[text] = 0
            ends: list[str] = []
            kept: list[str] = []
            for text in places:
                while not self.is_over(text) and text + self.letters[0] in self.rewards:
                    text = max((text + letter for letter in self.letters), key=self.bound)
                if self.is_over(text) and text in ends:
                    continue
                kept.append(text)
                if self.is_over(text):
                    ends.append(text)
                for length in range(len(text) + 1):
                    self.under_way[text[:length]] += 1
            if kept == ends:
                return ends
            for text in kept:
                if text not in ends:
                    for letter in self.letters:
                        self.rewards.setdefault(text + letter, [])
                        self.under_way.setdefault(text + letter, 0)
            places = kept

    def is_over(self, text: str) -> bool:
        return len(text) == self.depth or (text != "" and not self.rewards[text])

    def bound(self, text: str) -> float:
        rewards, waiting = self.rewards[text], self.under_way[text]
        n = len(rewards) + waiting
        parent = len(self.rewards[text[:-1]]) + self.under_way[text[:-1]]
        if self.rules.backup == "max":
            worth = max(rewards, default=0.0)
        elif self.rules.virtual == "loss":
            worth = sum(rewards + [0.0] * waiting) / n if n else 0.0
        else:
            worth = sum(rewards) / len(rewards) if rewards else 0.0
        if self.prior is not None:
            siblings = [self.prior(text[:-1] + letter) for letter in self.letters]
            share = self.prior(text) / sum(siblings)
            return worth + self.c * share * math.sqrt(max(parent, 1)) / (1 + n)
        return worth + self.c * math.sqrt(math.log(parent) / n) if n else math.inf


RULES = [
    {"virtual": virtual, "reward": reward, "backup": backup}
    for virtual, reward, backup in [
        ("loss", "leaf", "mean"),
        ("visit", "leaf", "mean"),
        ("loss", "mean", "max"),
        ("loss", "sum", "mean"),
        ("visit", "product", "max"),
        ("loss", "min", "mean"),
    ]
]


@pytest.mark.parametrize("priors", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("rules", RULES)
def test_visits_are_those_of_the_formulas(rules: Any, batch: int, priors: bool) -> None:
    salt, chosen = random.random(), MCTSRules(**rules)

    def worth(text: str) -> float:
        return random.Random(f"{salt}{text}").random()

    def prior(text: str) -> float:
        return random.Random(f"p{salt}{text}").random()

    slow = SlowTree("abc", 4, 0.9, worth, chosen, prior if priors else None)
    slow.run(70, batch)
    statistics: dict[SearchNode, NodeStatistics] = {}
    batches: list[list[str]] = []

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        batches.append([node.path_text for node in nodes])
        return [worth(node.path_text) for node in nodes]

    async def search(root: SearchNode) -> SearchOutcome:
        return await mcts(
            root,
            moves("abc"),
            evaluate,
            at_length(4),
            iterations=70,
            c=0.9,
            batch=batch,
            rules=chosen,
            priors=by_function(lambda n: prior(n.path_text)) if priors else None,
            statistics=statistics,
        )

    find(search)
    visits = {node.path_text: arm.visits for node, arm in statistics.items()}
    assert visits == {text: len(rewards) for text, rewards in slow.rewards.items()}
    for node, arm in statistics.items():
        assert arm.pending == 0
        assert arm.total == pytest.approx(sum(slow.rewards[node.path_text]))
        assert arm.best == pytest.approx(max(slow.rewards[node.path_text], default=-math.inf))
    # Solutions are not evaluated again, and those that were never visited are in the end.
    seen: set[str] = set()
    for found in slow.batches:
        want = [text for text in found if not (len(text) == 4 and text in seen)]
        seen |= set(found)
        if want:
            assert batches.pop(0) == want
    assert len(batches) <= 1


def test_output_rules() -> None:
    values = {"a": 0.3, "aa": 0.4, "ab": 0.1, "b": 0.2, "ba": 0.0, "bb": 0.95, "c": 0.0}

    def outcome(output: Any, **more: Any) -> tuple[str, dict[str, NodeStatistics]]:
        statistics: dict[SearchNode, NodeStatistics] = {}

        async def search(root: SearchNode) -> SearchOutcome:
            return await mcts(
                root,
                moves("abc"),
                table(values),
                at_length(2),
                iterations=23,
                c=0.4,
                rules=MCTSRules(output=output, **more),
                statistics=statistics,
            )

        found = find(search)
        assert found.best is not None and found.best is found.candidates[0]
        assert len(set(found.candidates)) == len(found.candidates)
        return found.best.path_text, {node.path_text: arm for node, arm in statistics.items()}

    for output in ("value", "reward"):
        assert outcome(output)[0] == "bb"
    keys: dict[str, Callable[[NodeStatistics], float]] = {
        "visits": lambda arm: arm.visits,
        "mean": lambda arm: arm.mean,
    }
    for output, key in keys.items():
        best, statistics = outcome(output)
        first = max("abc", key=lambda letter: key(statistics[letter]))
        assert best == first + max("abc", key=lambda letter: key(statistics[first + letter]))
    # The sum along the way, of which the best visit counts.
    best, statistics = outcome("reward", reward="sum", backup="max")
    assert (
        best == "aa"
        and statistics["aa"].reached == pytest.approx(0.3 + 0.4) == statistics["a"].best
    )
    assert statistics["aa"].best == 0.4 and not statistics["bb"].visits


def test_priors_are_the_models_own_probabilities() -> None:
    statistics: dict[SearchNode, NodeStatistics] = {}

    async def search(root: SearchNode) -> SearchOutcome:
        steps = sample_steps(12, stop=(), max_tokens=1)
        return await mcts(
            root,
            steps,
            table({}),
            at_length(1),
            iterations=3,
            priors=likelihood_priors,
            statistics=statistics,
        )

    find(search, hashed("abc", salt=5))
    chances = dict(hashed("abc", salt=5).continuations("", 1))
    first = {node.text: arm for node, arm in statistics.items() if node.depth == 1}
    whole = sum(chances[text] for text in first)
    for text, arm in first.items():
        assert arm.prior == pytest.approx(chances[text] / whole)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_draws_and_plays_side_by_side(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        won = by_function(lambda node: node.text.count("a"))
        play = rollouts(2, at_length(6), won, stop=(), max_tokens=2)
        steps = sample_steps(3, stop=(), max_tokens=2)
        return await mcts(root, steps, play, at_length(6), iterations=48, batch=batch)

    under_way = 0
    most = 0
    trees = []
    for _ in range(2):
        problem, backend = start(MODEL)
        sample = backend.sample

        async def counted(*args: Any, sample: Any = sample, **options: Any) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await sample(*args, **options)
            finally:
                under_way -= 1

        monkeypatch.setattr(backend, "sample", counted)
        trees.append(run(problem, search).tree)
    assert trees[0] == trees[1]
    assert most == 1 if batch == 1 else most >= 4


def test_rules_that_are_not_known_are_refused() -> None:
    with pytest.raises(InputError, match="backup must be one of mean, max, got 'median'"):
        MCTSRules(backup="median")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch must be at least 1"):
        find(lambda root: mcts(root, moves("a"), table({}), at_length(1), iterations=1, batch=0))
    with pytest.raises(InputError, match="priors must be weights of at least 0, got -1"):
        find(
            lambda root: mcts(
                root, moves("a"), table({}), at_length(1), iterations=1, priors=table({"a": -1})
            )
        )
