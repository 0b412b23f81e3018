"""What Monte Carlo tree search knows of a node, and the rules that choose by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal, get_args, get_type_hints

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

_REWARDS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "leaf": lambda values: values[-1],
    "mean": fmean,
    "sum": math.fsum,
    "min": min,
    "product": math.prod,
}


@dataclass(frozen=True, slots=True)
class MCTSRules:
    """How Monte Carlo tree search counts and chooses.

    virtual: what a visit sees of those under way beside it. "loss": visits of value 0 (Chaslot et
    al. 2008). "visit": visits, of which only the number counts (Liu et al. 2020).
    reward: what a visit counts for a node on its way, of the values from that node to the last one.
    backup: whether a node is worth the mean or the maximum of its visits.
    output: which solution comes first. That of the highest "value", that whose visit gave the root
    the highest "reward", or that to which the children of most "visits" or highest "mean" lead.

    Raises InputError for a rule that is not known.
    """

    virtual: Literal["loss", "visit"] = "loss"
    reward: Literal["leaf", "mean", "sum", "min", "product"] = "leaf"
    backup: Literal["mean", "max"] = "mean"
    output: Literal["value", "reward", "visits", "mean"] = "value"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(MCTSRules).items():
            if (rule := getattr(self, name)) not in get_args(kind):
                raise InputError(f"{name} must be one of {', '.join(get_args(kind))}, got {rule!r}")

    def rewards(self, own: Sequence[float]) -> list[float]:
        """What a visit counts for each node of its path, of the values of these nodes."""
        # The root has no value of its own.
        return [_REWARDS[self.reward](own[max(1, place) :]) for place in range(len(own))]


DEFAULT: Final = MCTSRules()


@dataclass(slots=True)
class NodeStatistics:
    """The visits of a node.

    total, best: the sum and the maximum of the values that they gave.
    own: the value that the node had when it was last evaluated.
    reached: the highest value that a visit which ended here gave the root.
    pending: visits that are under way.
    prior: its share among its siblings; None if there are no priors.
    """

    visits: int = 0
    total: float = 0.0
    best: float = -math.inf
    own: float = 0.0
    reached: float = -math.inf
    pending: int = 0
    prior: float | None = None

    @property
    def mean(self) -> float:
        """The mean value of the visits; 0 before the first."""
        return self.total / self.visits if self.visits else 0.0

    def add(self, value: float) -> None:
        """Count a visit."""
        self.visits += 1
        self.total += value
        self.best = max(self.best, value)

    def estimate_value(self, rules: MCTSRules) -> float:
        """What the visits say of the node, those under way included; 0 before the first."""
        if rules.backup == "max":
            return self.best if self.visits else 0.0
        if rules.virtual == "loss":
            return self.total / max(1, self.visits + self.pending)
        return self.mean

    def compute_ucb(self, parent_visits: int, c: float, rules: MCTSRules = DEFAULT) -> float:
        """How promising the node is, of n visits where its parent has N, those under way included.

        Without a prior it is the upper confidence bound, worth + c * sqrt(ln(N) / n), infinite for
        n = 0. With a prior p it is that of AlphaZero, worth + c * p * sqrt(N) / (1 + n), where N is
        at least 1.
        """
        visits = self.visits + self.pending
        if self.prior is not None:
            spread = self.prior * math.sqrt(max(1, parent_visits)) / (1 + visits)
            return self.estimate_value(rules) + c * spread
        if not visits:
            return math.inf
        return self.estimate_value(rules) + c * math.sqrt(math.log(parent_visits) / visits)


@check_argument_types
async def likelihood_priors(nodes: Sequence[SearchNode]) -> list[float]:
    """Priors in proportion to the model's own probability of each node's text."""
    top = max((node.logprob for node in nodes), default=0.0)
    return [math.exp(node.logprob - top) for node in nodes]


async def arms_of(children: Sequence[SearchNode], priors: Evaluate | None) -> list[NodeStatistics]:
    """Arms of siblings without visits. priors: gives weights, of which each takes its share.

    Raises InputError for a negative weight.
    """
    if priors is None:
        return [NodeStatistics() for _ in children]
    weights = await evaluate_nodes(children, priors)
    if min(weights, default=0.0) < 0:
        raise InputError(f"priors must be weights from 0 on, got {min(weights)}")
    whole = math.fsum(weights)
    for child, weight in zip(children, weights, strict=True):
        child.prior = weight / whole if whole else 1 / len(weights)
    return [NodeStatistics(prior=child.prior) for child in children]


class TreeStatistics:
    """The visits of a tree.

    arms: what is known of each node. ways: the children of each node that has been given some.
    """

    def __init__(self, arms: dict[SearchNode, NodeStatistics], c: float, rules: MCTSRules) -> None:
        """Visits that count by some rules. c: the weight of the second term of the bound."""
        self.arms, self.ways = arms, dict[SearchNode, list[SearchNode]]()
        self._c, self._rules = c, rules

    def next(self, node: SearchNode) -> SearchNode:
        """The child with the highest bound, the first of several."""
        visits = self.arms[node].visits + self.arms[node].pending
        bounds = [
            self.arms[child].compute_ucb(visits, self._c, self._rules) for child in self.ways[node]
        ]
        return self.ways[node][bounds.index(max(bounds))]

    def mark(self, paths: Iterable[Sequence[SearchNode]], change: int) -> None:
        """Note visits along paths as under way, or as no longer so."""
        for node in (node for path in paths for node in path):
            self.arms[node].pending += change

    def count(self, paths: Sequence[Sequence[SearchNode]]) -> None:
        """Count visits that were under way, and note what the nodes of their paths are worth."""
        self.mark(paths, -1)
        for path in paths:
            rewards = self._rules.rewards([self.arms[node].own for node in path])
            for node, value in zip(path, rewards, strict=True):
                arm = self.arms[node]
                arm.add(value)
                node.value, node.visits = arm.estimate_value(self._rules), arm.visits
            end = self.arms[path[-1]]
            end.reached = max(end.reached, rewards[0])

    def in_order(self, found: SearchOutcome, root: SearchNode) -> SearchOutcome:
        """Solutions, which are in the order of their values, in that of the output rule."""
        rule = self._rules.output
        if rule == "value" or not found.candidates:
            return found
        ranked = list(found.candidates)
        if rule == "reward":
            ranked.sort(key=lambda n: -self.arms[n].reached if n in self.arms else math.inf)
        else:
            node = root
            while below := [child for child in self.ways.get(node, ()) if self.arms[child].visits]:
                keys = [
                    self.arms[child].visits if rule == "visits" else self.arms[child].mean
                    for child in below
                ]
                node = below[keys.index(max(keys))]
            ranked.sort(key=lambda each: each is not node)
        return replace(found, best=ranked[0], candidates=tuple(ranked))
