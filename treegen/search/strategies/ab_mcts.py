"""Adaptive branching tree search (AB-MCTS, Inoue et al. 2025): go wider or deeper, at random."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.prompts.plan.seeds import row_seed
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.event_loop import gather
from treegen.search.posterior import Draw, draw_beta, draw_gaussian, draw_mixed
from treegen.search.propose import Step
from treegen.search.strategies.common import (
    DUPLICATE,
    Costs,
    Done,
    State,
    check_counts,
    collect_outcome,
    text_state,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Rule = Literal["m", "a", "a-beta"]
_DRAWS: Final[Mapping[str, Draw]] = {"a": draw_gaussian, "a-beta": draw_beta}


def check_rule(rule: str) -> None:
    """Raise InputError for an unknown rule."""
    if rule != "m" and rule not in _DRAWS:
        raise InputError(f"rule must be one of m, {', '.join(_DRAWS)}, got {rule!r}")


def deeper(
    options: Sequence[SearchNode],
    children: Sequence[SearchNode],
    barren: Sequence[float],
    values: Mapping[SearchNode, Sequence[float]],
    rule: Rule,
    rng: random.Random,
) -> SearchNode | None:
    """Return the child to continue from; None to generate a new child.

    Args:
        options: Children that may have children.
        children: All children of the node.
        barren: Values of attempts that made no new child.
        values: For each child, its own value and then the values of the nodes below it.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if not options:
        return None
    if rule == "m":
        groups = [*(values[child] for child in children), *([value] for value in barren)]
        *drawn, new = draw_mixed(groups, 1, rng)
        by_child = dict(zip(children, drawn, strict=False))
        best = max(options, key=by_child.__getitem__)
        return best if by_child[best] > new else None
    draw = _DRAWS[rule]
    wider = draw([*(values[child][0] for child in children), *barren], rng)
    if wider >= draw([value for child in children for value in values[child][1:]], rng):
        return None
    drawn = [draw(values[child], rng) for child in options]
    return options[drawn.index(max(drawn))]


def generator(made: Mapping[str, Sequence[float]], rule: Rule, rng: random.Random) -> str:
    """Return the name of the generator to use next.

    Args:
        made: By generator name, the values of all nodes that it has made.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if len(made) == 1:
        return next(iter(made))
    if rule == "m":
        names = sorted(made, key=lambda name: not made[name])  # those without values come last
        seen = [made[name] for name in names if made[name]]
        drawn = draw_mixed(seen, len(names) - len(seen), rng)
    else:
        names = list(made)
        drawn = [_DRAWS[rule](made[name], rng) for name in names]
    return names[drawn.index(max(drawn))]


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
        rule: "m": the mixed model of `posterior.draw_mixed` over the values below each child. "a":
            a new child draws from the values that the children had when they were new, and all
            existing children together draw from the values of the nodes below them. If these win,
            each child draws from the values at and below it. Draws are those of
            `posterior.draw_gaussian`. "a-beta": as "a", with draws of `posterior.draw_beta`.
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
    check_rule(rule)
    if isinstance(generate, Mapping) and not generate:
        raise InputError("generate has no functions; give at least one by name")
    generators = dict(generate) if isinstance(generate, Mapping) else {"": generate}
    tree = _Branches(
        root,
        list(generators),
        done,
        rule=rule,
        depth=depth,
        refine=refine,
        observed={} if observed is None else observed,
    )
    first, costs = {state(root): root}, Costs(root.search)
    stopped, left = "", iterations
    try:
        while left > 0:
            num = costs.most(min(batch, left), "children", "values")
            chosen, left = [tree.choose() for _ in range(num)], left - num
            requests = {choice: chosen.count(choice) for choice in chosen}
            calls = gather(generators[name](node, n) for (node, name), n in requests.items())
            drawn = await costs.of("children", num, calls)
            fresh = list(dict.fromkeys(child for group in drawn for child in group))
            new = [child for child in fresh if first.setdefault(state(child), child) is child]
            values = await costs.of("values", len(new), evaluate_nodes(new, evaluate))
            for child, value in zip(new, values, strict=True):
                child.value, tree.observed[child] = value, []
            for child in [child for child in fresh if child not in tree.observed]:
                # Its parent is not pruned, even if it has no other child.
                child.pruned, child.pruned_because = True, DUPLICATE
                child.drop()
            for ((node, name), n), group in zip(requests.items(), drawn, strict=True):
                for attempt in [*group, *[None] * (n - len(group))]:
                    known = None if attempt is None else first[state(attempt)].value
                    tree.add(node, name, attempt, known or 0.0)
    except BudgetReached as end:
        stopped = str(end)
    return await collect_outcome(root, done, evaluate, stopped, inner=refine)


class _Branches:
    """The children, failed attempts and values of one search.

    Attributes:
        observed: The values at and below each node that was kept.
    """

    def __init__(
        self,
        root: SearchNode,
        names: Sequence[str],
        done: Done,
        *,
        rule: Rule,
        depth: int | None,
        refine: bool,
        observed: dict[SearchNode, list[float]],
    ) -> None:
        self._root, self._done = root, done
        self._rule, self._depth, self._refine = rule, depth, refine
        self.observed = observed
        self._children: defaultdict[SearchNode, list[SearchNode]] = defaultdict(list)
        # Values of attempts without a new child, by parent.
        self._barren: defaultdict[SearchNode, list[float]] = defaultdict(list)
        self._made: dict[str, list[float]] = {name: [] for name in names}
        self._above: dict[SearchNode, SearchNode] = {}
        origin = root.search.origin_of(root.key)
        self._rng = random.Random(row_seed(root.search.params.seed, origin, len(root.children)))

    def choose(self) -> tuple[SearchNode, str]:
        """Return the node to generate a child of, and the name of the function."""
        node, steps = self._root, 0
        while True:
            steps += 1
            children = self._children[node]
            options = [child for child in children if self._is_open(child, steps)]
            child = deeper(
                options, children, self._barren[node], self.observed, self._rule, self._rng
            )
            if child is None:
                return node, generator(self._made, self._rule, self._rng)
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
            self._children[node].append(child)
            self._above[child] = node
            self.observed[child].append(value)
            child.visits = 1
            if len(self._made) > 1 and child.data is None:
                child.data = {"by": name}
        else:
            self._barren[node].append(value)
        self._note(node, value)
        self._made[name].append(value)

    def _is_open(self, node: SearchNode, steps: int) -> bool:
        is_short = self._depth is None or steps < self._depth
        return (self._refine or not self._done(node)) and is_short

    def _note(self, node: SearchNode, value: float) -> None:
        while node is not self._root:
            self.observed[node].append(value)
            node.visits += 1
            node = self._above[node]
