"""What live caches save a tree search, against the same search that re-prompts each node.

The figures of docs/benchmarks/measure.md come from

    python examples/benchmarks/search_caches.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiny_model import ABOUT, FEW_SHOT, checkpoint, questions

from treegen.bench.timing import describe_machine, headline
from treegen.cli.bench.options import CHECKPOINT, int_option
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.llm import LLM
from treegen.model.config import resolve_device
from treegen.prompts.tree import Node
from treegen.report.tables import PrintableTable
from treegen.search import (
    AskTell,
    SampleRequest,
    SearchNode,
    SearchOutcome,
    SearchResult,
    bfs,
    mean_logprob,
    sample_steps,
)


@dataclass(frozen=True, slots=True)
class SearchTime:
    """The cost of one way to run all searches.

    prefilled: prompt tokens that the model computed.
    decoded: generated tokens.
    nodes: nodes of all trees.
    """

    name: str
    seconds: float
    prefilled: int
    decoded: int
    nodes: int


def compare(
    model: str | None = None,
    *,
    problems: int = 64,
    samples: int = 4,
    breadth: int = 3,
    depth: int = 4,
    step_tokens: int = 16,
) -> list[SearchTime]:
    """Run tree of thoughts over many problems at once, with and without live caches.

    Each search draws `samples` children of every node of a level and keeps the `breadth` best of
    them by mean log-probability, down to `depth`. Without live caches, all waiting nodes of all
    searches are prompted in one call, which shares common prefixes within the call only.

    Args:
        model: A checkpoint; None for a tiny one with random weights.
        problems: Number of problems. Default: 64.
        samples: Children of each node. Default: 4.
        breadth: Nodes of a level that are kept. Default: 3.
        depth: Levels of the tree. Default: 4.
        step_tokens: Tokens of each node. Default: 16.
    """
    with checkpoint(model) as path:
        llm = LLM(path, max_rows=problems * breadth * samples, check=False)
        prompts = [FEW_SHOT + question for question in questions(problems)]
        params = SamplingParams(max_tokens=step_tokens, ignore_eos=True)

        async def solve(root: SearchNode) -> SearchOutcome:
            step = sample_steps(samples, stop=())
            return await bfs(
                root,
                step,
                mean_logprob,
                lambda node: node.depth == depth,
                breadth=breadth,
                depth=depth,
                solutions=None,
            )

        llm.search(solve, prompts[:2], params)  # warm up
        start = time.perf_counter()
        results = llm.search(solve, prompts, params, concurrency=problems)
        prefilled = sum(result.usage.tokens_prefilled for result in results)
        live = _time("live caches", start, prefilled, results)
        return [live, _run_reprompted(llm, AskTell(solve, prompts, params))]


def _time(name: str, start: float, prefilled: int, results: Sequence[SearchResult]) -> SearchTime:
    seconds = time.perf_counter() - start
    usages = [result.usage for result in results]
    return SearchTime(
        name,
        seconds,
        prefilled,
        sum(usage.tokens_decoded for usage in usages),
        sum(usage.nodes for usage in usages),
    )


def _run_reprompted(llm: LLM, searches: AskTell) -> SearchTime:
    start = time.perf_counter()
    prefilled = 0
    while requests := searches.ask():
        sample_requests = [request for request in requests if isinstance(request, SampleRequest)]
        texts = [request.context.text for request in sample_requests]
        params = replace(sample_requests[0].params, n=len(sample_requests[0].indices))
        answers, computed = _generate(llm, texts, params)
        prefilled += computed
        for request, completions in zip(sample_requests, answers, strict=True):
            searches.tell(request, completions)
    done = [result for result in searches.results if result is not None]
    return _time("every node prompted anew", start, prefilled, done)


def _generate(
    llm: LLM, texts: Sequence[str], params: SamplingParams
) -> tuple[list[list[Completion]], int]:
    """Return n samples of each text, and the number of prompt tokens that were computed."""
    leaves = [Node(text, samples=params.n, id=str(i)) for i, text in enumerate(texts)]
    result = llm.run(Node("", children=leaves, samples=0), replace(params, n=1))
    return [result.of(str(i)) for i in range(len(texts))], result.usage.prompt_tokens_computed


@script
@CHECKPOINT
@int_option("--problems", 64, "Searches at once.")
@int_option("--samples", 4, "Thoughts per node.")
@int_option("--breadth", 3, "Thoughts that go on per level.")
@int_option("--depth", 4, "Levels.")
@int_option("--step-tokens", 16, "Tokens per thought.")
@JSON
def main(model: str | None, **sizes: int) -> None:
    """Tree of thoughts with live caches, against prompting the text of every node anew."""
    machine = describe_machine(resolve_device("auto"))
    echo(f"{headline(machine)}\n")
    rows = live, again = compare(model, **sizes)
    echo(
        "{problems} searches at once: {depth} levels of {step_tokens} tokens, {samples} thoughts "
        "per node, {breadth} go on; ".format(**sizes)
        + (model or ABOUT)
    )
    columns = {
        "Search": "{0.name}",
        "seconds": "{0.seconds:.2f}",
        "prompt tokens computed": "{0.prefilled:,}",
        "tokens decoded": "{0.decoded:,}",
        "nodes": "{0.nodes:,}",
    }
    print_table(PrintableTable.of(rows, columns, words=["Search"]))
    echo(
        f"\n{again.prefilled / live.prefilled:.1f} times fewer prompt tokens, "
        f"{again.seconds / live.seconds:.2f} times the speed"
    )
    json_line({"machine": machine, "search": rows})


if __name__ == "__main__":
    main()
