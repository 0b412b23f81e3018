"""The speed of Monte Carlo tree search compared with beam search, at equal decoded tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from treegen.bench.tiny import FEW_SHOT, checkpoint, questions
from treegen.common.params import SamplingParams
from treegen.llm import LLM
from treegen.search import Budget, SearchNode, SearchOutcome, beam, by_function, mcts, sample_steps


@dataclass(frozen=True, slots=True)
class MethodTime:
    """The cost of one method on all problems at once.

    seconds: the median of all repeats. steps: forward passes.
    decoded: generated tokens. nodes: nodes of all trees.
    """

    name: str
    seconds: float
    steps: int
    decoded: int
    nodes: int


def compare_methods(
    model: str | None = None,
    *,
    problems: int = 64,
    samples: int = 4,
    breadth: int = 3,
    depth: int = 4,
    step_tokens: int = 16,
    batches: Sequence[int] = (1, 4, 8),
    repeats: int = 1,
) -> list[MethodTime]:
    """Run beam search, and tree search in batches of several sizes that may decode as many tokens.

    The methods take turns in each repeat, so that other load on the machine affects all alike. Each
    method first runs once untimed, so that no time includes capturing CUDA graphs. The value of a
    node follows from its text alone, so no method decodes tokens for values.

    Args:
        model: A checkpoint; None for a tiny one with random weights.
        problems: Number of problems. Default: 64.
        samples: Children of each node. Default: 4.
        breadth: Nodes of a level that the beam keeps. Default: 3.
        depth: Levels of the tree. Default: 4.
        step_tokens: Tokens of each node. Default: 16.
        batches: Batch sizes of the tree search. Default: 1, 4 and 8.
        repeats: Timed runs of each method. Default: 1.
    """
    with checkpoint(model) as path:
        # No method waits for rows: a batch expands at most one node for each of its visits.
        max_rows = problems * samples * max(breadth, *batches)
        llm = LLM(path, max_rows=max_rows, check=False)
        prompts = [FEW_SHOT + question for question in questions(problems)]
        params = SamplingParams(max_tokens=step_tokens, ignore_eos=True, seed=0)
        propose = sample_steps(samples, stop=())
        value = by_function(lambda node: (sum(node.tokens) % 97) / 97)

        def done(node: SearchNode) -> bool:
            return node.depth == depth

        async def by_beam(root: SearchNode) -> SearchOutcome:
            return await beam(root, propose, value, done, width=breadth, depth=depth)

        async def by_mcts(root: SearchNode, batch: int) -> SearchOutcome:
            return await mcts(root, propose, value, done, iterations=10**6, batch=batch)

        def time_method(
            name: str, fn: Callable[[SearchNode], Awaitable[SearchOutcome]], tokens: int | None
        ) -> MethodTime:
            """Search all problems once with one method.

            Args:
                name: The name of the method.
                fn: The search.
                tokens: Maximum tokens per problem; None for no limit.
            """
            budget = None if tokens is None else Budget(tokens=tokens)
            decoded.clear()
            nodes.clear()
            start, steps = time.perf_counter(), 0
            with llm.search_stream(fn, prompts, params, concurrency=problems, budget=budget) as run:
                while run.has_work:
                    run.step()
                    steps += 1
                    results = run.take_results()
                    for result in results:
                        decoded.append(result.usage.tokens_decoded)
                        nodes.append(result.usage.nodes)
            return MethodTime(name, time.perf_counter() - start, steps, sum(decoded), sum(nodes))

        decoded: list[int] = []
        nodes: list[int] = []
        ways: list[tuple[str, Callable[[SearchNode], Awaitable[SearchOutcome]]]] = [
            ("beam", by_beam)
        ]
        ways += [(f"mcts, batches of {size}", partial(by_mcts, batch=size)) for size in batches]
        rows: dict[str, list[MethodTime]] = {name: [] for name, _ in ways}
        limit: int | None = None  # most tokens that the beam decodes for one problem
        for _ in range(1 + repeats):
            for name, fn in ways:
                rows[name].append(time_method(name, fn, limit if name != "beam" else None))
                limit = limit or max(decoded)
        return [
            replace(own[-1], seconds=statistics.median(row.seconds for row in own[1:]))
            for own in rows.values()
        ]
