"""Adaptive branching tree search (AB-MCTS, Inoue et al. 2025): go wider or deeper, at random.

It compares posterior draws of the next score (Thompson sampling).
`draw_gaussian` and `draw_beta` use scores of one kind. `draw_mixed` uses groups of similar scores:
scores of one group also inform the draws of other groups, and of a new group.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist, fmean
from typing import Final, Literal

import numpy as np

from treegen.common.checks import check_argument_types, check_counts
from treegen.errors import InputError
from treegen.prompts.plan.draws import row_seed
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.event_loop import gather
from treegen.search.propose import Step
from treegen.search.strategies.common import (
    DUPLICATE,
    Costs,
    Done,
    State,
    collect_outcome,
    text_state,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Draw = Callable[[Sequence[float], random.Random], float]
"""Draws the mean of some scores from its posterior; from its prior if there are no scores."""

# Priors of Inoue et al. 2025. The mean is N(M, s^2 / KAPPA), where s^2 has the scaled inverse
# chi-squared distribution of NU and TAU2. A and B are Jeffreys' prior for scores from 0 to 1.
M, KAPPA, NU, TAU2 = 0.0, 1.0, 1.0, 0.1
A, B = 0.5, 0.5
# Priors of the mixed model.
MEAN, MEAN_SCALE, GROUP_SCALE, NOISE_SCALE = 0.5, 0.2, 0.2, 0.3
_POINTS: Final = 16


@check_argument_types
def draw_gaussian(scores: Sequence[float], rng: random.Random) -> float:
    """Draw a mean, for normal scores of unknown mean and variance."""
    n = len(scores)
    mean = fmean(scores) if scores else 0.0
    kappa, nu = KAPPA + n, NU + n
    spread = math.fsum((score - mean) ** 2 for score in scores)
    spread += NU * TAU2 + n * KAPPA * (M - mean) ** 2 / kappa
    variance = spread / rng.gammavariate(nu / 2, 2.0)
    return rng.gauss((KAPPA * M + n * mean) / kappa, math.sqrt(variance / kappa))


@check_argument_types
def draw_beta(scores: Sequence[float], rng: random.Random) -> float:
    """Draw a mean, for scores that are success rates of one trial each.

    Args:
        scores: Scores from 0 to 1.
        rng: Source of randomness.

    Raises:
        InputError: A score is not from 0 to 1.
    """
    if not all(0 <= score <= 1 for score in scores):
        raise InputError(
            f"the beta rule requires values from 0 to 1, got {list(scores)}; scale the values"
        )
    won = math.fsum(scores)
    return rng.betavariate(A + won, B + len(scores) - won)


@check_argument_types
def draw_mixed(groups: Sequence[Sequence[float]], num: int, rng: random.Random) -> list[float]:
    """Draw the next score of each group, and then of `num` groups without scores.

    The model: score = a + noise, with a ~ N(mu, group_scale^2) for each group, noise ~ N(0,
    noise_scale^2), mu ~ N(MEAN, MEAN_SCALE^2), and the two scales half-normal. Given the scales,
    everything else is normal and is integrated exactly. The scales themselves are on a grid of 16 x
    16 points, the midpoints of equally likely parts of their priors, so there is no Markov chain
    that has to mix. Each draw is from the posterior predictive distribution, independent of the
    other draws.

    Args:
        groups: Scores of each group, at least one per group.
        num: Groups without scores.
        rng: Source of randomness.

    Raises:
        InputError: A group has no scores.
    """
    if not all(len(group) for group in groups):
        raise InputError("each group needs at least one score")
    sizes = np.array([len(group) for group in groups], dtype=float)
    means = np.array([fmean(group) for group in groups])
    spreads = math.fsum(
        (score - mean) ** 2 for group, mean in zip(groups, means, strict=True) for score in group
    )
    group_var, noise_var = _grid()
    variances = group_var[:, None] + noise_var[:, None] / sizes  # variances of the groups' means
    precision = 1 / MEAN_SCALE**2 + (1 / variances).sum(axis=1)
    centre = (MEAN / MEAN_SCALE**2 + (means / variances).sum(axis=1)) / precision
    distance = ((means - MEAN) ** 2 / variances).sum(axis=1)
    distance -= precision * (centre - MEAN) ** 2
    evidence = -0.5 * (
        np.log(variances).sum(axis=1)
        + np.log(precision)
        + distance
        + spreads / noise_var
        + (sizes - 1).sum() * np.log(noise_var)
    )
    weights = np.exp(evidence - evidence.max()).cumsum()

    def draw(size: float, mean: float) -> float:
        point = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        point = min(point, len(weights) - 1)
        between, noise = float(group_var[point]), float(noise_var[point])
        mu = rng.gauss(float(centre[point]), 1 / math.sqrt(float(precision[point])))
        share = 1 / (1 / between + size / noise)
        group_mean = rng.gauss(share * (mu / between + size * mean / noise), math.sqrt(share))
        return rng.gauss(group_mean, math.sqrt(noise))

    draws = [draw(float(n), float(mean)) for n, mean in zip(sizes, means, strict=True)]
    return draws + [draw(0.0, 0.0) for _ in range(num)]


@cache
def _grid() -> tuple[np.ndarray, np.ndarray]:
    """Return the variances between groups and of the noise, at all points of the grid."""
    half = [NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * _POINTS)) for i in range(_POINTS)]
    between, noise = np.meshgrid(GROUP_SCALE * np.array(half), NOISE_SCALE * np.array(half))
    return between.ravel() ** 2, noise.ravel() ** 2


Rule = Literal["m", "a", "a-beta"]
_DRAWS: Final[Mapping[str, Draw]] = {"a": draw_gaussian, "a-beta": draw_beta}


def choose_child(
    options: Sequence[SearchNode],
    children: Sequence[SearchNode],
    childless: Sequence[float],
    values: Mapping[SearchNode, Sequence[float]],
    rule: Rule,
    rng: random.Random,
) -> SearchNode | None:
    """Return the child to continue from; None to generate a new child.

    Args:
        options: Children that may have children.
        children: All children of the node.
        childless: Values of attempts that made no new child.
        values: For each child, its own value and then the values of the nodes below it.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if not options:
        return None
    if rule == "m":
        groups = [*(values[child] for child in children), *([value] for value in childless)]
        *draws, new = draw_mixed(groups, 1, rng)
        by_child = dict(zip(children, draws, strict=False))
        best = max(options, key=by_child.__getitem__)
        return best if by_child[best] > new else None
    draw = _DRAWS[rule]
    wider = draw([*(values[child][0] for child in children), *childless], rng)
    if wider >= draw([value for child in children for value in values[child][1:]], rng):
        return None
    draws = [draw(values[child], rng) for child in options]
    return options[draws.index(max(draws))]


def choose_generator(values: Mapping[str, Sequence[float]], rule: Rule, rng: random.Random) -> str:
    """Return the name of the generator to use next.

    Args:
        values: By generator name, the values of all nodes that it has made.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if len(values) == 1:
        return next(iter(values))
    if rule == "m":
        names = sorted(values, key=lambda name: not values[name])  # those without values come last
        scored = [values[name] for name in names if values[name]]
        draws = draw_mixed(scored, len(names) - len(scored), rng)
    else:
        names = list(values)
        draws = [_DRAWS[rule](values[name], rng) for name in names]
    return names[draws.index(max(draws))]


@check_argument_types
async def ab_mcts(  # noqa: PLR0913 -- users name these settings of a search
    root: SearchNode,
    generate: Step | Mapping[str, Step],
    evaluate: Evaluate,
    done: Done,
    *,
    iterations: int,
    rule: Rule = "m",
    batch: int = 1,
    depth: int | None = None,
    refine: bool = False,
    state: State = text_state,
    observed: dict[SearchNode, list[float]] | None = None,
) -> SearchOutcome:
    """Generate nodes one by one, each below the node that Thompson sampling chooses.

    From the root down, each node has as options a new child (wider) and every existing child
    (deeper). Each option draws a score from the posterior of its values, and the highest draw wins.
    The search descends until a new child wins. The new child's value then counts for all nodes
    above it.

    Args:
        root: Node to search below.
        generate: Makes new children; or several such functions by name, one for each LLM. Thompson
            sampling then also chooses the function, from the values of all nodes that each has
            made. Its name is stored in the child's `data`, if that is empty.
        evaluate: Gives nodes their values, where 0 is bad and 1 is good.
        done: Whether a node ends a solution.
        iterations: Maximum number of children to generate.
        rule: "m": the mixed model of `draw_mixed` over the values below each child. "a": a new
            child draws from the values that the children had when they were new, and all existing
            children together draw from the values of the nodes below them. If these win, each child
            draws from the values at and below it. Draws are those of `draw_gaussian`. "a-beta": as
            "a", with draws of `draw_beta`.
        batch: Children to choose at once, if the budget has room.
        depth: Maximum number of steps of a path; None is no limit.
        refine: Whether solutions have children too, as improved solutions.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept. An attempt that makes no node counts as a value of 0, and one that makes a known
            state counts as that state's value.
        observed: Mapping to fill with the values at and below each node, for callers that inspect
            them.

    Raises:
        InputError: The rule is unknown, or `generate` has no functions.
    """
    check_counts(iterations=iterations, batch=batch, depth=depth)
    if isinstance(generate, Mapping) and not generate:
        raise InputError("generate must not be empty; pass at least one function by name")
    generators = dict(generate) if isinstance(generate, Mapping) else {"": generate}
    origin = root.search.origin_of(root.key)
    rng = random.Random(row_seed(root.search.params.seed, origin, len(root.children)))
    values_of: dict[str, list[float]] = {name: [] for name in generators}
    observed = {} if observed is None else observed
    tree = _Branches(root, done, rule, depth, refine, rng, observed, values_of)
    first, costs = {state(root): root}, Costs(root.search)
    stopped, remaining = "", iterations
    try:
        while remaining > 0:
            num = costs.most(min(batch, remaining), "children", "values")
            chosen, remaining = [tree.choose() for _ in range(num)], remaining - num
            requests = {choice: chosen.count(choice) for choice in chosen}
            calls = gather(generators[name](node, n) for (node, name), n in requests.items())
            groups = await costs.of("children", num, calls)
            fresh = list(dict.fromkeys(child for group in groups for child in group))
            new = [child for child in fresh if first.setdefault(state(child), child) is child]
            values = await costs.of("values", len(new), evaluate_nodes(new, evaluate))
            for child, value in zip(new, values, strict=True):
                child.value, tree.observed[child] = value, []
            for child in [child for child in fresh if child not in tree.observed]:
                # Its parent is not pruned, even if it has no other child.
                child.pruned, child.pruned_because = True, DUPLICATE
                child.free()
            for ((node, name), n), group in zip(requests.items(), groups, strict=True):
                for attempt in [*group, *[None] * (n - len(group))]:
                    seen_value = None if attempt is None else first[state(attempt)].value
                    tree.add(node, name, attempt, seen_value or 0.0)
    except BudgetReached as end:
        stopped = str(end)
    return await collect_outcome(root, done, evaluate, stopped, inner=refine)


@dataclass(slots=True)
class _Branches:
    """The children, failed attempts and values of one search."""

    root: SearchNode
    done: Done
    rule: Rule
    depth: int | None
    refine: bool
    rng: random.Random
    observed: dict[SearchNode, list[float]]
    """The values at and below each node that was kept."""
    values: dict[str, list[float]]
    """The values of the nodes that each function has made."""
    children: defaultdict[SearchNode, list[SearchNode]] = field(
        default_factory=lambda: defaultdict(list)
    )
    childless: defaultdict[SearchNode, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Values of attempts without a new child, by parent."""
    above: dict[SearchNode, SearchNode] = field(default_factory=dict)

    def choose(self) -> tuple[SearchNode, str]:
        """Return the node to generate a child of, and the name of the function."""
        node, steps = self.root, 0
        while True:
            steps += 1
            children = self.children[node]
            options = [child for child in children if self._is_open(child, steps)]
            child = choose_child(
                options, children, self.childless[node], self.observed, self.rule, self.rng
            )
            if child is None:
                return node, choose_generator(self.values, self.rule, self.rng)
            node = child

    def add(self, node: SearchNode, name: str, child: SearchNode | None, value: float) -> None:
        """Count one attempt to generate a child.

        Args:
            node: The parent.
            name: The name of the function.
            child: The child, if the attempt made one.
            value: Its value, or that of the node with the same state.
        """
        if child is not None and child in self.observed:
            self.children[node].append(child)
            self.above[child] = node
            self.observed[child].append(value)
            child.visits = 1
            if len(self.values) > 1 and child.data is None:
                child.data = {"by": name}
        else:
            self.childless[node].append(value)
        self.values[name].append(value)
        while node is not self.root:
            self.observed[node].append(value)
            node.visits += 1
            node = self.above[node]

    def _is_open(self, node: SearchNode, steps: int) -> bool:
        is_short = self.depth is None or steps < self.depth
        return (self.refine or not self.done(node)) and is_short
