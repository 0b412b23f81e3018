"""Adaptive branching tree search against its paper's rules, written slowly."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from toy_search import MODEL, at_length, find, run, start, texts

from treegen.errors import InputError
from treegen.prompts.plan.draws import row_seed
from treegen.search.evaluate import by_function
from treegen.search.propose import Step
from treegen.search.strategies import ab_mcts as posterior
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

# Draws, written slowly


def slow_gaussian(scores: Sequence[float], rng: random.Random) -> float:
    """Bayes' rule, one score after another, for a normal-inverse-chi-squared prior."""
    mean, kappa, nu, scale = 0.0, 1.0, 1.0, 0.1
    for score in scores:
        scale = (nu * scale + kappa / (kappa + 1) * (score - mean) ** 2) / (nu + 1)
        mean = (kappa * mean + score) / (kappa + 1)
        kappa, nu = kappa + 1, nu + 1
    variance = nu * scale / rng.gammavariate(nu / 2, 2.0)  # a chi-squared number
    return rng.gauss(mean, math.sqrt(variance / kappa))


def slow_beta(scores: Sequence[float], rng: random.Random) -> float:
    won, lost = 0.5, 0.5
    for score in scores:
        won, lost = won + score, lost + 1 - score
    return rng.betavariate(won, lost)


def slow_mixed(groups: Sequence[Sequence[float]], num: int, rng: random.Random) -> list[float]:
    """The mixed model as one big normal distribution for each pair of scales."""
    stats = pytest.importorskip("scipy.stats")
    num_points = posterior._POINTS
    parts = [(i + 0.5) / num_points for i in range(num_points)]
    half = [NormalDist().inv_cdf(0.5 + part / 2) for part in parts]
    scales = [(0.2 * between, 0.3 * noise) for noise in half for between in half]
    scores = np.array([score for group in groups for score in group])
    of = [number for number, group in enumerate(groups) for _ in group]
    size = len(groups) + num

    def joint(between: float, noise: float) -> np.ndarray:
        """Covariances of mu, of what each group adds to it, and of the scores' noise."""
        basis = np.zeros((1 + size + len(of), 1 + size + len(of)))
        basis[0, 0] = 0.2
        for group in range(size):
            basis[1 + group, 0], basis[1 + group, 1 + group] = 0.2, between
        for row, group in enumerate(of, start=1 + size):
            basis[row] = basis[1 + group]
            basis[row, row] = noise
        covariance: np.ndarray = basis @ basis.T
        return covariance

    def given(covariance: np.ndarray, place: int, seen: list[int], values: Any) -> Any:
        """Mean and variance of one entry, given the values of others; all means are 0.5."""
        if not seen:
            return 0.5, covariance[place, place]
        weights = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[seen, place])
        mean = 0.5 + weights @ (np.array(values) - 0.5)
        return mean, covariance[place, place] - weights @ covariance[seen, place]

    observed = list(range(1 + size, 1 + size + len(of)))
    evidence = [
        stats.multivariate_normal.logpdf(
            scores, np.full(len(of), 0.5), joint(*pair)[np.ix_(observed, observed)]
        )
        if of
        else 0.0
        for pair in scales
    ]
    weights = np.cumsum(np.exp(np.array(evidence) - max(evidence)))
    drawn = []
    for group in range(size):
        number = rng.random() * weights[-1]
        point = next(place for place, weight in enumerate(weights) if weight > number)
        covariance = joint(*scales[point])
        mean, variance = given(covariance, 0, observed, scores)
        mu = rng.gauss(mean, math.sqrt(variance))
        mean, variance = given(covariance, 1 + group, [0, *observed], [mu, *scores])
        own = rng.gauss(mean, math.sqrt(variance))
        drawn.append(rng.gauss(own, scales[point][1]))
    return drawn


@pytest.mark.parametrize(
    "groups", [[], [[0.3]], [[0.0, 1.0], [0.5]], [[0.9, 0.8, 0.85], [0.1], [0.2, 0.2]]]
)
def test_the_mixed_model_is_that_of_the_big_normal_distribution(groups: Any) -> None:
    for seed in range(3):
        found = posterior.draw_mixed(groups, 2, random.Random(seed))
        assert found == pytest.approx(slow_mixed(groups, 2, random.Random(seed)), abs=1e-6)


def test_the_grid_is_near_to_the_model() -> None:
    """Against draws from the priors, weighted by the likelihood."""
    groups = [[0.9, 0.8, 1.0], [0.2], [0.4, 0.6]]
    rng = np.random.default_rng(0)
    size = 400_000
    mu = rng.normal(0.5, 0.2, size)
    between, noise = np.abs(rng.normal(0, 0.2, size)), np.abs(rng.normal(0, 0.3, size))
    own = mu[:, None] + between[:, None] * rng.normal(size=(size, 4))
    logs = np.zeros(size)
    for number, group in enumerate(groups):
        for score in group:
            logs += -0.5 * ((score - own[:, number]) / noise) ** 2 - np.log(noise)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    wanted = own + noise[:, None] * rng.normal(size=(size, 4))
    draws = np.array([posterior.draw_mixed(groups, 1, random.Random(seed)) for seed in range(4000)])
    for place in range(4):
        mean = weights @ wanted[:, place]
        spread = math.sqrt(weights @ (wanted[:, place] - mean) ** 2)
        assert draws[:, place].mean() == pytest.approx(mean, abs=0.025)
        assert draws[:, place].std() == pytest.approx(spread, abs=0.03)


def test_draws_have_the_distributions_that_they_claim() -> None:
    stats = pytest.importorskip("scipy.stats")
    scores = [0.2, 0.9, 0.4]
    rng = random.Random(1)
    means = [posterior.draw_gaussian(scores, rng) for _ in range(3000)]
    centre, kappa, nu = 1.5 / 4, 4, 4
    tau2 = (0.1 + sum((s - 0.5) ** 2 for s in scores) + 3 * 0.25 / 4) / nu
    wanted = stats.t(nu, centre, math.sqrt(tau2 / kappa))
    assert stats.kstest(means, wanted.cdf).pvalue > 0.001
    shares = [posterior.draw_beta(scores, rng) for _ in range(3000)]
    assert stats.kstest(shares, stats.beta(2.0, 2.0).cdf).pvalue > 0.001
    with pytest.raises(InputError, match="values from 0 to 1"):
        posterior.draw_beta([1.5], rng)


# The search, written slowly


class SlowNode:
    """A node with what the paper calls its GEN node, its CONT node, and their scores."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.children: list[SlowNode] = []
        self.own: dict[str, list[float]] = {}  # of each child, what was backed up through it
        self.gen: list[float] = []
        self.cont: list[float] = []
        self.failed: list[float] = []
        self.num_made = 0


class SlowSearch:
    """One node after another, as the paper says it; batches of one."""

    def __init__(
        self,
        rule: str,
        make: dict[str, Callable[[str, int], str | None]],
        worth: Callable[[str], float],
        depth: int,
        seed: int,
    ) -> None:
        self.rule, self.make, self.worth, self.depth = rule, make, worth, depth
        self.rng = random.Random(seed)
        self.root = SlowNode("")
        self.by_arm: dict[str, list[float]] = {name: [] for name in make}
        self.seen = {""}
        self.log: list[str] = []

    def iterate(self) -> None:
        node, way = self.root, [self.root]
        while (below := self.go_deeper(node)) is not None:
            node = below
            way.append(node)
        arm = self.choose_arm()
        text = self.make[arm](node.text, node.num_made)
        node.num_made += 1
        self.log.append(f"{node.text}>{arm}>{text}")
        value = 0.0 if text is None else self.worth(text)
        if text is None or text in self.seen:
            node.failed.append(value)
        else:
            self.seen.add(text)
            node.children.append(SlowNode(text))
            node.own[text] = [value]
            node.gen.append(value)
        self.by_arm[arm].append(value)
        for above, child in itertools.pairwise(way):
            above.own[child.text].append(value)
            above.cont.append(value)

    def go_deeper(self, node: SlowNode) -> SlowNode | None:
        going = [child for child in node.children if len(child.text) < self.depth]
        if not going:
            return None
        if self.rule == "m":
            groups = [*node.own.values(), *([value] for value in node.failed)]
            drawn = slow_mixed(groups, 1, self.rng)
            scored = dict(zip(node.own, drawn, strict=False))
            best = max(going, key=lambda child: scored[child.text])
            return best if scored[best.text] > drawn[-1] else None
        draw = slow_gaussian if self.rule == "a" else slow_beta
        if draw(node.gen + node.failed, self.rng) >= draw(node.cont, self.rng):
            return None
        scored = {child.text: draw(node.own[child.text], self.rng) for child in going}
        return max(going, key=lambda child: scored[child.text])

    def choose_arm(self) -> str:
        if len(self.by_arm) == 1:
            return next(iter(self.by_arm))
        if self.rule == "m":
            seen = [name for name, values in self.by_arm.items() if values]
            new = [name for name in self.by_arm if name not in seen]
            drawn = slow_mixed([self.by_arm[name] for name in seen], len(new), self.rng)
            return max(zip(drawn, seen + new, strict=True), key=lambda pair: pair[0])[1]
        draw = slow_gaussian if self.rule == "a" else slow_beta
        scores = {name: draw(values, self.rng) for name, values in self.by_arm.items()}
        return max(scores, key=lambda name: scores[name])


def sampler(salt: object) -> Callable[[str, int], str | None]:
    """A fake model: the text that the n-th sample after a text makes, now and then none."""

    def make(text: str, index: int) -> str | None:
        letter = random.Random(f"{salt}/{text}/{index}").choice("abcd!")
        return None if letter == "!" else text + letter

    return make


def step_of(
    make: Callable[[str, int], str | None], counts: dict[str, int], log: list[str], name: str = ""
) -> Step:
    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        made = []
        for _ in range(n):
            text = make(node.path_text, counts.get(node.path_text, 0))
            counts[node.path_text] = counts.get(node.path_text, 0) + 1
            log.append(f"{node.path_text}>{name}>{text}")
            if text is not None:
                made.append(node.extend(text[-1]))
        return made

    return step


@pytest.fixture
def coarse_grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer pairs of scales, so that the slow model takes less time."""
    monkeypatch.setattr(posterior, "_POINTS", 5)
    posterior._grid.cache_clear()
    yield
    posterior._grid.cache_clear()


@pytest.mark.parametrize("arms", [("",), ("small", "large")])
@pytest.mark.parametrize(("rule", "num"), [("a", 80), ("a-beta", 80), ("m", 40)])
@pytest.mark.parametrize("seed", range(2))
def test_nodes_are_generated_where_the_rules_say(
    rule: Any, num: int, arms: tuple[str, ...], seed: int, coarse_grid: None
) -> None:
    def worth(text: str) -> float:
        return random.Random(f"{seed}{text}").random()

    make = {name: sampler(f"{seed}{name}") for name in arms}
    slow = SlowSearch(rule, make, worth, 4, row_seed(None, "toy/", 0))
    for _ in range(num):
        slow.iterate()
    counts: dict[str, int] = {}
    log: list[str] = []
    observed: dict[SearchNode, list[float]] = {}

    async def search(root: SearchNode) -> SearchOutcome:
        steps = {name: step_of(make[name], counts, log, name) for name in arms}
        return await ab_mcts(
            root,
            steps if len(arms) > 1 else steps[""],
            by_function(lambda node: worth(node.path_text)),
            at_length(4),
            iterations=num,
            rule=rule,
            observed=observed,
        )

    found = find(search)
    assert log == slow.log
    values: dict[str, list[float]] = {}
    todo = [slow.root]
    while todo:
        node = todo.pop()
        values |= node.own
        todo += node.children
    assert {node.path_text: scores for node, scores in observed.items()} == values
    assert all(each.visits == len(scores) for each, scores in observed.items())
    if len(arms) > 1:
        for each in observed:
            above = each.parent.path_text if each.parent is not None else ""
            assert f"{above}>{each.data['by']}>{each.path_text}" in log
    assert len(log) == num and found.candidates == tuple(
        sorted(found.candidates, key=lambda node: -worth(node.path_text))
    )


@pytest.mark.parametrize("rule", ["a", "a-beta", "m"])
def test_a_good_generator_and_good_nodes_get_most_of_the_budget(rule: Any) -> None:
    """One generator makes good nodes; below "a" values are high, elsewhere low."""
    log: list[str] = []

    def worth(node: SearchNode) -> float:
        good = node.path_text.count("a") / max(1, len(node.path_text))
        return 0.1 + 0.8 * good

    def always(letter: str) -> Callable[[str, int], str]:
        return lambda text, index: text + letter

    async def search(root: SearchNode) -> SearchOutcome:
        ways = {name: step_of(always(name), {}, log, name) for name in "ab"}
        return await ab_mcts(
            root, ways, by_function(worth), lambda _: False, iterations=60, rule=rule, batch=4
        )

    find(search)
    assert len(log) == 60
    assert sum(">a>" in line for line in log) > 36


def test_batches_choose_before_they_generate() -> None:
    sizes: list[int] = []

    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        sizes.append(n)
        return await node.sample(n, stop=(), max_tokens=2)

    async def search(root: SearchNode) -> SearchOutcome:
        value = by_function(lambda node: node.path_text.count("a") / len(node.path_text))
        return await ab_mcts(root, step, value, at_length(6), iterations=40, batch=8, rule="a")

    trees = [run(start(MODEL)[0], search).tree for _ in range(2)]
    assert trees[0] == trees[1]
    assert sizes[0] == 8 and sum(sizes) == 80


def test_solutions_may_be_refined() -> None:
    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        return await node.sample(n, stop=(), max_tokens=2)

    async def search(root: SearchNode) -> SearchOutcome:
        value = by_function(lambda node: 1 - abs(len(node.path_text) - 4) / 4)
        return await ab_mcts(
            root, step, value, lambda _: True, iterations=40, depth=3, refine=True, rule="m"
        )

    found = find(search)
    assert found.best is not None and len(found.best.path_text) == 4
    assert {len(text) for text in texts(found.candidates)} == {2, 4, 6}


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(InputError, match="rule must be one of m, a, a-beta, got 'b'"):
        find(
            lambda root: ab_mcts(
                root,
                {},
                by_function(lambda _: 0),
                at_length(1),
                iterations=1,
                rule="b",  # type: ignore[arg-type]
            )
        )
