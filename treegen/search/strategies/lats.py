"""Language agent tree search (LATS, Zhou et al. 2023), which learns from its failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field

from treegen.common.checks import check_argument_types, check_counts
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.strategies.common import (
    DEAD_END,
    Done,
    State,
    collect_outcome,
    drop_duplicates,
    prune,
    rank,
    text_state,
)
from treegen.search.strategies.node_statistics import NodeStatistics
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Lessons = Sequence[str]
ProposeAfter = Callable[[SearchNode, Lessons], Awaitable[Sequence[SearchNode]]]
"""Makes the next steps of a node, given the lessons of failures."""
EvaluateAfter = Callable[[Sequence[SearchNode], Lessons], Awaitable[Sequence[float]]]
"""Gives the values of nodes, given the lessons of failures."""
Reflect = Callable[[SearchNode, float], Awaitable[str]]
"""Writes the lesson of a path's end and its reward."""


@check_argument_types
async def lats(  # noqa: PLR0913 -- users name these settings of a search
    root: SearchNode,
    propose: ProposeAfter,
    evaluate: EvaluateAfter,
    done: Done,
    reward: Evaluate,
    reflect: Reflect,
    *,
    iterations: int,
    depth: int,
    c: float = 1.0,
    success: float = 1.0,
    num_lessons: int = 4,
    state: State = text_state,
) -> SearchOutcome:
    """Play to an end repeatedly, learn a lesson from each failure, and stop at a success.

    Each play goes from the root to an end. A node without children gets some, which are evaluated.
    The play continues from the best unvisited child by value. If all were visited, it takes the
    child with the highest V + c * sqrt(ln(N) / n), for n visits of the child and N of the node. The
    reward of the end counts for all nodes of the play: V is the mean of these rewards, and the
    first reward replaces the evaluation, as in the paper's algorithm. Ends are not played again.

    Args:
        root: Node to search below.
        propose: As for other strategies, but it also gets the lessons so far.
        evaluate: As for other strategies, but it also gets the lessons so far.
        done: Whether a node ends a solution, and so a play. A path of `depth` steps also ends a
            play.
        reward: Gives the reward of an end, from the environment or a judge. It does not get the
            lessons.
        reflect: Writes a lesson for an end whose reward is less than `success`.
        iterations: Maximum number of plays.
        depth: Maximum number of steps of a path.
        c: Weight of the exploration term.
        success: A reward of at least this value ends the search.
        num_lessons: Number of lessons to keep; the latest are kept.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(iterations=iterations, depth=depth, num_lessons=num_lessons)
    arms, seen = {root: NodeStatistics()}, {state(root)}
    plays = _Plays(root, propose, evaluate, done, depth, c, state, arms, seen)
    ends: list[SearchNode] = []
    stopped = ""
    try:
        for _ in range(iterations):
            path = await plays.play()
            if not path:
                break
            end = path[-1]
            ends.append(end)
            (end_reward,) = await evaluate_nodes([end], reward)
            plays.count(path, end_reward)
            if end_reward >= success:
                break
            plays.open_children[path[-2]].remove(end)
            plays.lessons.append(await reflect(end, end_reward))
            del plays.lessons[:-num_lessons]
    except BudgetReached as reached:
        stopped = str(reached)
    solutions = rank(node for node in ends if done(node))
    if not solutions:  # no play has reached a solution
        return await collect_outcome(root, done, reward, stopped)
    return SearchOutcome(solutions[0], tuple(solutions), stopped=stopped)


@dataclass(slots=True)
class _Plays:
    """The tree of a search: its statistics, the children that are still open, and the lessons."""

    root: SearchNode
    propose: ProposeAfter
    evaluate: EvaluateAfter
    done: Done
    depth: int
    c: float
    state: State
    arms: dict[SearchNode, NodeStatistics]
    seen: set[Hashable]
    open_children: dict[SearchNode, list[SearchNode]] = field(default_factory=dict)
    lessons: list[str] = field(default_factory=list)

    async def play(self) -> list[SearchNode]:
        """Return the path to an end; empty if no end is left."""
        path = [self.root]
        while path:
            node = path[-1]
            if (node is not self.root and self.done(node)) or len(path) > self.depth:
                return path
            if node not in self.open_children:
                await self._expand(node)
            if self.open_children[node]:
                path.append(self._best_child(node))
            else:
                path.pop()
                if path:
                    self.open_children[path[-1]].remove(node)
                    if not self.arms[node].visits:  # it has no continuation
                        prune([node], self.root, DEAD_END)
        return path

    def count(self, path: Sequence[SearchNode], reward: float) -> None:
        """Count a reward for all nodes of a play."""
        for node in path:
            self.arms[node].add(reward)
            node.value, node.visits = self.arms[node].mean, self.arms[node].visits

    async def _expand(self, node: SearchNode) -> None:
        proposed = await self.propose(node, self.lessons)
        children = drop_duplicates(proposed, self.state, self.seen, self.root)
        self.open_children[node] = children
        values = await evaluate_nodes(children, lambda nodes: self.evaluate(nodes, self.lessons))
        for child, value in zip(children, values, strict=True):
            self.arms[child], child.value = NodeStatistics(), value

    def _best_child(self, node: SearchNode) -> SearchNode:
        visits = self.arms[node].visits

        def score(child: SearchNode) -> tuple[float, float]:
            return self.arms[child].compute_ucb(visits, self.c), child.value or 0.0

        return max(self.open_children[node], key=score)
