"""What live caches save a tree search, against the same search that prompts each node anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treegen.bench.tiny import FEW_SHOT, checkpoint, questions
from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.llm import LLM
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
    """One way of running all searches, and what it took.

    prefilled: prompt tokens that went through the model.
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
    """Run tree of thought over many problems at once, with live caches and without them.

    Each search draws `samples` children of every node of a level and keeps the `breadth` best of
    them all by mean logprob, down to `depth`. Every step has `step_tokens` tokens. Without live
    caches all nodes of all searches that wait are prompted in one call, which shares what their
    texts share within the call.
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
        wanted = [request for request in requests if isinstance(request, SampleRequest)]
        texts = [request.context.text for request in wanted]
        params = replace(wanted[0].params, n=len(wanted[0].indices))
        answers, computed = _generate(llm, texts, params)
        prefilled += computed
        for request, completions in zip(wanted, answers, strict=True):
            searches.tell(request, completions)
    done = [result for result in searches.results if result is not None]
    return _time("every node prompted anew", start, prefilled, done)


def _generate(
    llm: LLM, texts: Sequence[str], params: SamplingParams
) -> tuple[list[list[Completion]], int]:
    """Return n samples of each text, and the prompt tokens that were computed."""
    from treegen.prompts.tree import Node

    leaves = [Node(text, samples=params.n, id=str(i)) for i, text in enumerate(texts)]
    result = llm.run(Node("", children=leaves, samples=0), replace(params, n=1))
    return [result.of(str(i)) for i in range(len(texts))], result.usage.prompt_tokens_computed
