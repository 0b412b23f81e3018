"""The speed of Monte Carlo tree search compared with beam search, at equal decoded tokens.

The figures of docs/search/mcts.md come from these, with 2 to 64 problems:

    python examples/benchmarks/search_methods.py --problems 16 --repeats 3
    python examples/benchmarks/search_methods.py --model DIR --problems 16 --repeats 3
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiny_model import FEW_SHOT, checkpoint, questions

from treegen.bench.timing import describe_machine, headline
from treegen.cli.bench.options import CHECKPOINT, int_option
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.common.params import SamplingParams
from treegen.llm import LLM
from treegen.model.config import resolve_device
from treegen.report.tables import PrintableTable
from treegen.search import Budget, SearchNode, SearchOutcome, beam, by_function, mcts, sample_steps

_Search = Callable[[SearchNode], Awaitable[SearchOutcome]]


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

        methods: dict[str, _Search] = {"beam": by_beam}
        for size in batches:
            methods[f"mcts, batches of {size}"] = partial(by_mcts, batch=size)
        times: dict[str, list[MethodTime]] = {name: [] for name in methods}
        limit: int | None = None  # maximum tokens that the beam decodes for one problem
        for _ in range(1 + repeats):
            for name, search in methods.items():
                budget = None if name == "beam" or limit is None else Budget(tokens=limit)
                cost, max_cost_tokens = _time_method(llm, name, search, prompts, params, budget)
                times[name].append(cost)
                limit = limit or max_cost_tokens
        return [
            replace(runs[-1], seconds=statistics.median(run.seconds for run in runs[1:]))
            for runs in times.values()
        ]


def _time_method(
    llm: LLM,
    name: str,
    search: _Search,
    prompts: Sequence[str],
    params: SamplingParams,
    budget: Budget | None,
) -> tuple[MethodTime, int]:
    """Search all problems at once; return the cost, and the maximum tokens of one problem."""
    decoded: list[int] = []
    nodes = steps = 0
    start = time.perf_counter()
    with llm.search_stream(
        search, prompts, params, concurrency=len(prompts), budget=budget
    ) as stream:
        while stream.has_work:
            stream.step()
            steps += 1
            for result in stream.take_results():
                decoded.append(result.usage.tokens_decoded)
                nodes += result.usage.nodes
    seconds = time.perf_counter() - start
    return MethodTime(name, seconds, steps, sum(decoded), nodes), max(decoded)


@script
@CHECKPOINT
@int_option("--problems", 64, "Searches at once.")
@int_option("--samples", 4, "Children per node.")
@int_option("--breadth", 3, "Nodes that the beam keeps per level.")
@int_option("--depth", 4, "Levels.")
@int_option("--step-tokens", 16, "Tokens per node.")
@int_option("--repeats", 1, "Seconds are the medians of so many runs, which take turns.")
@JSON
def main(model: str | None, **sizes: Any) -> None:
    """A beam against Monte Carlo tree search in batches of several sizes, at equal tokens."""
    machine = describe_machine(resolve_device("auto"))
    echo(f"{headline(machine)}\n")
    times = compare_methods(model, **sizes)
    beam_seconds = times[0].seconds
    columns: dict[str, str | Callable[[MethodTime], str]] = {
        "Method": "{0.name}",
        "seconds": "{0.seconds:.2f}",
        "beam = 1": lambda time: f"{time.seconds / beam_seconds:.2f}",
        "forward passes": "{0.steps:,}",
        "tokens decoded": "{0.decoded:,}",
        "nodes": "{0.nodes:,}",
    }
    print_table(PrintableTable.of(times, columns, words=["Method"]))
    json_line({"machine": machine, "methods": times})


if __name__ == "__main__":
    main()
