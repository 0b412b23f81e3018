"""Run a job by treegen: `python examples/peers/run_treegen.py JOB DIR`.

Flat prompts go to `LLM.generate`, which finds what they share; searches go to `LLM.search`, whose
nodes keep their caches.
"""

import asyncio
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from workload import (
    Job,
    arguments,
    config_of,
    find_max_sizes,
    has_weights,
    jobs_of,
    measure,
    run_job,
    score_job,
    versions_of,
)

from treegen import LLM, SamplingParams, __version__, from_module, load_model
from treegen.bench.shapes import byte_tokenizer
from treegen.search import SearchNode


def main() -> None:
    """Load the model, run the job and print the table."""
    options = arguments().parse_args()
    jobs = jobs_of(options.jobs, options.tokens)
    rows, _ = find_max_sizes(jobs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if has_weights(options.checkpoint):
        model = load_model(options.checkpoint, dtype=options.dtype)
    else:
        with torch.device(device):
            module: Any = AutoModelForCausalLM.from_config(
                config_of(jobs[0].shape), dtype=getattr(torch, options.dtype)
            )
        model = from_module(module)
    llm = LLM(model, tokenizer=byte_tokenizer(), max_rows=rows)

    def params(samples: int, new_tokens: int) -> SamplingParams:
        return SamplingParams(n=samples, max_tokens=new_tokens, ignore_eos=True)

    def structured(job: Job, run: int) -> int:
        request = SamplingParams(n=job.samples, max_tokens=job.new_tokens, regex=job.pattern)

        def draw(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
            answers = llm.generate(prompts, request)
            return [[[*completion.tokens] for completion in completions] for completions in answers]

        return run_job(job, run, draw)

    def score(pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        return [[*result.logprobs] for result in llm.score(pairs)]

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        answers = llm.generate(prompts, params(samples, new))
        return [[[*completion.tokens] for completion in completions] for completions in answers]

    def search(job: Job, run: int) -> int:
        async def solve(root: SearchNode) -> None:
            draws, frontier = random.Random(0), [root]
            for _ in range(job.steps):
                groups = await asyncio.gather(*(node.sample(job.samples) for node in frontier))
                children = [child for group in groups for child in group]
                frontier = draws.sample(children, min(job.keep, len(children)))
                frontier_ids = {id(node) for node in frontier}
                for child in children:
                    if id(child) not in frontier_ids:
                        child.drop()

        problems = [(f"p{i}", prompt) for i, prompt in enumerate(job.prompts(run))]
        results = llm.search(
            solve, problems, params(1, job.new_tokens), concurrency=job.num_problems
        )
        assert not any(result.error for result in results)
        return sum(result.usage.tokens_decoded for result in results)

    def work(job: Job, run: int) -> int:
        if job.kind == "score":
            return score_job(job, run, score)
        if job.kind == "structured":
            return structured(job, run)
        return search(job, run) if job.steps > 1 else run_job(job, run, generate)

    measure(
        "treegen",
        {"treegen": __version__} | versions_of("torch", "transformers"),
        {"sharing": "auto", "max_rows": rows, "device": str(model.device), "searches": "live"},
        jobs,
        options,
        work,
    )


if __name__ == "__main__":
    main()
