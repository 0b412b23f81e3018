"""Compare a beam search over nodes of a server, over its texts, and in one process.

The table has, for each way, the prompt tokens computed, the seconds, the requests and the bytes
sent. A fresh `treegen serve` answers each of the remote ways.

    python examples/benchmarks/remote_search.py --problems 64
"""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import httpx2

from treegen import LLM, SamplingParams
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import json_line
from treegen.evals.task import TaskOptions
from treegen.integrations.client import RemoteLLM
from treegen.search import SearchNode, SearchOutcome, beam, is_ended, mean_logprob, sample_steps
from treegen.tasks import get_task

_STOP = "."
_MAX_TOKENS = 24


@dataclass
class Cost:
    """The cost of all searches in one way."""

    prefilled: int
    seconds: float
    requests: int = 0
    bytes_sent: int = 0


@script
@click.option("--model", default="demo", show_default=True, help="A model's directory or name.")
@click.option("--problems", default=64, show_default=True, help="Number of prompts.")
@click.option("--width", default=4, show_default=True, help="Nodes kept at each depth.")
@click.option("--expand", default=4, show_default=True, help="Samples of each node.")
@click.option("--depth", default=5, show_default=True, help="Number of steps.")
@JSON
def main(model: str, problems: int, width: int, expand: int, depth: int) -> None:
    """Run the three ways and print the table."""
    task = get_task("gsm8k")
    data = task.load(TaskOptions(limit=None, num_fewshot=8))
    questions = [data.fewshot + task.ask(problem) for problem in data.problems]  # type: ignore[attr-defined]
    prompts = [(f"p{index}", questions[index % len(questions)]) for index in range(problems)]
    how = (width, expand, depth)
    costs = {
        "nodes": search_nodes(model, prompts, *how),
        "text": search_texts(model, prompts, *how),
        "`llm.search`": search_locally(model, prompts, *how),
    }
    print("| | prompt tokens computed | seconds | requests | bytes sent |\n|---|--:|--:|--:|--:|")
    for name, cost in costs.items():
        sent = [f"{value:,}" if value else "" for value in (cost.requests, cost.bytes_sent)]
        print(f"| {name} | {cost.prefilled:,} | {cost.seconds:.1f} | {' | '.join(sent)} |")
    json_line({"costs": costs})


def make_search(width: int, expand: int, depth: int) -> Any:
    """Return a beam search by mean log-probability."""

    async def search(root: SearchNode) -> SearchOutcome:
        propose = sample_steps(expand, stop=_STOP, max_tokens=_MAX_TOKENS)
        return await beam(root, propose, mean_logprob, is_ended, width=width, depth=depth)

    return search


def search_locally(model: str, prompts: list[Any], *how: int) -> Cost:
    """Search in this process."""
    llm = LLM(model)
    begin = time.monotonic()
    run = llm.search_stream(make_search(*how), prompts, SamplingParams(seed=1))
    failed = [result.error for result in run if result.error]
    if failed:
        raise SystemExit(failed[0])
    return Cost(run.usage.prompt_tokens_computed, time.monotonic() - begin)


def search_nodes(model: str, prompts: list[Any], *how: int) -> Cost:
    """Search over nodes of a server."""
    with serving(model) as url:
        llm = RemoteLLM(url)
        begin = time.monotonic()
        results = llm.search(make_search(*how), prompts, SamplingParams(seed=1))
        seconds = time.monotonic() - begin
        failed = [result.error for result in results if result.error]
        if failed:
            raise SystemExit(failed[0])
        return Cost(count_prefilled(url), seconds, llm.num_requests, llm.num_sent)


def search_texts(model: str, prompts: list[Any], *how: int) -> Cost:
    """Search by sending the whole text of each path again, and rely on the prefix cache."""
    with serving(model) as url:
        cost = Cost(0, 0.0)
        begin = time.monotonic()
        asyncio.run(_search_texts(url, [prompt for _, prompt in prompts], cost, *how))
        cost.seconds = time.monotonic() - begin
        cost.prefilled = count_prefilled(url)
        return cost


async def _search_texts(url: str, prompts: list[str], cost: Cost, *how: int) -> None:
    limits = httpx2.Limits(max_connections=256)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        searches = (_beam_of_texts(client, prompt, cost, *how) for prompt in prompts)
        await asyncio.gather(*searches)


async def _beam_of_texts(
    client: httpx2.AsyncClient, prompt: str, cost: Cost, width: int, expand: int, depth: int
) -> None:
    """Keep the best texts by mean log-probability, as `beam` does with nodes.

    Args:
        client: The connections.
        prompt: The prompt.
        cost: Counts requests and bytes.
        width: Texts to keep.
        expand: Continuations per text.
        depth: Steps.
    """

    async def expand_text(text: str, logprobs: list[float]) -> list[tuple[str, list[float], bool]]:
        body = {"prompt": text, "n": expand, "stop": _STOP, "max_tokens": _MAX_TOKENS}
        request = client.build_request("POST", "completions", json={**body, "logprobs": 0})
        cost.requests += 1
        cost.bytes_sent += len(request.content)
        response = await client.send(request)
        response.raise_for_status()
        steps = []
        for choice in response.json()["choices"]:
            tokens = choice["logprobs"]["tokens"]
            stopped = bool(tokens) and _STOP in tokens[-1]
            ended = choice["finish_reason"] == "stop" and not stopped
            more = choice["logprobs"]["token_logprobs"]
            step = choice["text"] + (_STOP if stopped else "")
            steps.append((text + step, logprobs + more, ended))
        return steps

    beam: list[tuple[str, list[float], bool]] = [(prompt, [], False)]
    for _ in range(depth):
        expansions = await asyncio.gather(
            *(expand_text(text, p) for text, p, ended in beam if not ended)
        )
        texts = [step for steps in expansions for step in steps] + [
            step for step in beam if step[2]
        ]
        texts.sort(key=lambda step: -sum(step[1]) / max(1, len(step[1])))
        beam = list({text: (text, p, ended) for text, p, ended in texts}.values())[:width]
        if all(ended for _, _, ended in beam):
            break


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Start a server, and yield its base URL."""
    command = [sys.executable, "-m", "treegen", "serve", "--model", model, "--port", "0"]
    command += ["--max-waiting", "100000", "--max-nodes", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            yield next(line for line in server.stderr if "is served at" in line).split()[-1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()


def count_prefilled(url: str) -> int:
    """Return the number of prompt tokens that a server has computed."""
    metrics = httpx2.get(f"{url.removesuffix('/v1')}/metrics").text
    (number,) = re.findall(r"^treegen_prompt_tokens_computed_total (\S+)", metrics, re.MULTILINE)
    return int(float(number))


if __name__ == "__main__":
    main()
