"""The statistics that Monte Carlo tree search keeps per node, and the rules that choose by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal

from treegen.common.checks import check_argument_types, checked_class
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


@checked_class
@dataclass(frozen=True, slots=True)
class MCTSRules:
    """How Monte Carlo tree search counts visits and chooses nodes.

    Raises:
        InputError: A rule is unknown.
    """

    virtual: Literal["loss", "visit"] = "loss"
    """How a visit sees the concurrent visits. "loss": as visits of value 0 (Chaslot et al. 2008).
    "visit": only their number counts (Liu et al. 2020)."""
    reward: Literal["leaf", "mean", "sum", "min", "product"] = "leaf"
    """What a visit counts for a node on its path, computed from the values from that node to the
    last one."""
    backup: Literal["mean", "max"] = "mean"
    """Whether a node's value is the mean or the maximum of its visits."""
    output: Literal["value", "reward", "visits", "mean"] = "value"
    """Which solution comes first. "value": the one with the highest value. "reward": the one whose
    visit gave the root the highest reward. "visits", "mean": the one that is reached by following
    the children with most visits or with the highest mean."""

    def rewards(self, values: Sequence[float]) -> list[float]:
        """Return the reward of a visit for each node of its path.

        Args:
            values: The value of each node of the path.
        """
        # The root is not evaluated, so its reward starts at the first node below it.
        return [_REWARDS[self.reward](values[max(1, index) :]) for index in range(len(values))]


DEFAULT: Final = MCTSRules()


@dataclass(slots=True)
class NodeStatistics:
    """The visits of a node."""

    visits: int = 0
    total: float = 0.0
    """Sum of the values of the visits."""
    best: float = -math.inf
    """Maximum of the values of the visits."""
    value: float = 0.0
    """Value of the node at its last evaluation."""
    reached: float = -math.inf
    """Highest value that a visit which ended at this node gave the root."""
    pending: int = 0
    """Visits that have not ended."""
    prior: float | None = None
    """The node's share among its siblings; None if there are no priors."""

    @property
    def mean(self) -> float:
        """Mean value of the visits; 0 before the first."""
        return self.total / self.visits if self.visits else 0.0

    def add(self, value: float) -> None:
        """Count a visit."""
        self.visits += 1
        self.total += value
        self.best = max(self.best, value)

    def estimate_value(self, rules: MCTSRules) -> float:
        """Return the node's value by its visits, pending ones included; 0 before the first."""
        if rules.backup == "max":
            return self.best if self.visits else 0.0
        if rules.virtual == "loss":
            return self.total / max(1, self.visits + self.pending)
        return self.mean

    def compute_ucb(self, parent_visits: int, c: float, rules: MCTSRules = DEFAULT) -> float:
        """Return the bound by which the node competes with its siblings.

        Let n be the node's visits and N its parent's, pending ones included. Without a prior, the
        bound is the upper confidence bound value + c * sqrt(ln(N) / n), infinite for n = 0. With a
        prior p it is that of AlphaZero, value + c * p * sqrt(N) / (1 + n), where N is at least 1.

        Args:
            parent_visits: Visits of the parent, pending ones included.
            c: Weight of the second term.
            rules: How visits count.
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
    """Return priors in proportion to the model's own probability of each node's text."""
    top = max((node.logprob for node in nodes), default=0.0)
    return [math.exp(node.logprob - top) for node in nodes]


async def make_statistics(
    children: Sequence[SearchNode], priors: Evaluate | None
) -> list[NodeStatistics]:
    """Return the statistics of siblings without visits.

    Args:
        children: The siblings.
        priors: Gives weights, which are normalized to shares; None for no priors.

    Raises:
        InputError: A weight is negative.
    """
    if priors is None:
        return [NodeStatistics() for _ in children]
    weights = await evaluate_nodes(children, priors)
    if min(weights, default=0.0) < 0:
        raise InputError(f"priors must be weights of at least 0, got {min(weights)}")
    total = math.fsum(weights)
    for child, weight in zip(children, weights, strict=True):
        child.prior = weight / total if total else 1 / len(weights)
    return [NodeStatistics(prior=child.prior) for child in children]


class TreeStatistics:
    """The visits of a tree.

    Attributes:
        nodes: Statistics of each node.
        children: The children of each node that has been expanded.
    """

    def __init__(self, nodes: dict[SearchNode, NodeStatistics], c: float, rules: MCTSRules) -> None:
        """Start without expanded nodes.

        Args:
            nodes: Statistics of each node; filled by the search.
            c: Weight of the second term of the bound.
            rules: How visits count.
        """
        self.nodes, self.children = nodes, dict[SearchNode, list[SearchNode]]()
        self._c, self._rules = c, rules

    def next(self, node: SearchNode) -> SearchNode:
        """Return the child with the highest bound; ties go to the first."""
        visits = self.nodes[node].visits + self.nodes[node].pending
        bounds = [
            self.nodes[child].compute_ucb(visits, self._c, self._rules)
            for child in self.children[node]
        ]
        return self.children[node][bounds.index(max(bounds))]

    def mark(self, paths: Iterable[Sequence[SearchNode]], change: int) -> None:
        """Add `change` to the pending visits of all nodes on some paths."""
        for node in (node for path in paths for node in path):
            self.nodes[node].pending += change

    def count(self, paths: Sequence[Sequence[SearchNode]]) -> None:
        """Count pending visits as ended, and update the values of the nodes on their paths."""
        self.mark(paths, -1)
        for path in paths:
            rewards = self._rules.rewards([self.nodes[node].value for node in path])
            for node, value in zip(path, rewards, strict=True):
                statistics = self.nodes[node]
                statistics.add(value)
                node.value, node.visits = statistics.estimate_value(self._rules), statistics.visits
            end = self.nodes[path[-1]]
            end.reached = max(end.reached, rewards[0])

    def in_order(self, outcome: SearchOutcome, root: SearchNode) -> SearchOutcome:
        """Sort solutions, which come in the order of their values, by the output rule."""
        rule = self._rules.output
        if rule == "value" or not outcome.candidates:
            return outcome
        ranked = list(outcome.candidates)
        if rule == "reward":
            ranked.sort(key=lambda n: -self.nodes[n].reached if n in self.nodes else math.inf)
        else:
            node = root
            while below := [
                child for child in self.children.get(node, ()) if self.nodes[child].visits
            ]:
                keys = [
                    self.nodes[child].visits if rule == "visits" else self.nodes[child].mean
                    for child in below
                ]
                node = below[keys.index(max(keys))]
            ranked.sort(key=lambda candidate: candidate is not node)
        return replace(outcome, best=ranked[0], candidates=tuple(ranked))
