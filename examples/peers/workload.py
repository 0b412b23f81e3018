"""The jobs that every engine runs, checkpoints for them, and the table that every runner prints.

    python examples/peers/workload.py JOB DIR                 # config and random weights
    python examples/peers/workload.py JOB DIR --config-only   # for engines that make weights up

A runner takes several jobs of one shape too, by commas: the engine starts once for them.

Prompts are token ids that depend on a job's sizes and the number of the run alone, so that engines
get equal ones, and no run finds its prompts in a cache. Nothing here imports an engine.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

JOBS = json.loads((Path(__file__).parent / "jobs.json").read_text(encoding="utf-8"))

HEAD = """\
| job | engine | tokens/s | range | seconds | CPU s | tokens | peak memory | versions |
|---|---|---:|---|---:|---:|---:|---|---|"""

TURN = "PEERS_TURN"
"""The environment variable that names a file; a program waits until the file exists."""

Generate = Callable[[list[list[int]], int, int], list[list[list[int]]]]
"""(prompts, samples, new tokens) -> the token ids of every sample of every prompt."""

Score = Callable[[list[tuple[list[int], list[int]]]], list[list[float]]]
"""(prompt, continuation) pairs -> the log-probability of each token of each continuation."""


@dataclass(frozen=True)
class Job:
    """Prompts as a tree, and what is drawn below each leaf.

    levels: tokens of a node and nodes per parent, from the root down.
    steps, keep: a search draws `samples` continuations of every open node `steps` times, and keeps
        `keep` of a problem's, chosen at random.
    kind: "score" asks for the log-probabilities of `samples` given continuations below each prompt
        instead of drawing; "structured" draws samples that match `pattern`.
    """

    name: str
    shape: str
    levels: list[list[int]]
    samples: int
    new_tokens: int
    steps: int = 1
    keep: int = 0
    kind: str = "draw"

    @property
    def vocab_size(self) -> int:
        return int(JOBS["shapes"][self.shape]["vocab_size"])

    @property
    def num_problems(self) -> int:
        return math.prod(branches for _, branches in self.levels)

    @property
    def rows(self) -> int:
        """Samples that can be drawn at once."""
        return self.num_problems * self.samples * max(1, self.keep)

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its samples."""
        return sum(tokens for tokens, _ in self.levels) + self.steps * self.new_tokens

    @property
    def pattern(self) -> str:
        """A regular expression whose texts all have `new_tokens` bytes."""
        return rf'\{{"answer": "[a-z ]{{{self.new_tokens - 29}}}", "score": [0-9]{{4}}\}}'

    def continuations(self, run: int) -> list[list[list[int]]]:
        """Return the continuations of each prompt that a job of kind "score" asks for."""
        draws = random.Random(f"{self.name}/{run}/continuations")
        return [
            [
                [draws.randrange(3, self.vocab_size) for _ in range(self.new_tokens)]
                for _ in range(self.samples)
            ]
            for _ in range(self.num_problems)
        ]

    def prompts(self, run: int) -> list[list[int]]:
        """Return the prompts of a run as token ids; those below one node share its tokens."""
        draws, paths = random.Random(f"{self.name}/{run}"), [[]]  # type: ignore[var-annotated]
        for tokens, branches in self.levels:
            paths = [
                path + [draws.randrange(3, self.vocab_size) for _ in range(tokens)]
                for path in paths
                for _ in range(branches)
            ]
        return paths


def job_of(name: str) -> Job:
    """Return a job of jobs.json."""
    if name not in JOBS["jobs"]:
        sys.exit(f"JOB must be one of {', '.join(JOBS['jobs'])}, got {name!r}")
    return Job(name, **JOBS["jobs"][name])


def jobs_of(
    names: str,
    max_tokens: int | None = None,
    kinds: tuple[str, ...] = ("draw", "score", "structured"),
) -> list[Job]:
    """Return jobs of one shape, whose names stand between commas; cut their samples if asked."""
    jobs = [job_of(name) for name in names.split(",")]
    if refused := [job.name for job in jobs if job.kind not in kinds]:
        sys.exit(f"this program does not support the jobs {', '.join(refused)}; remove these jobs")
    if max_tokens:
        jobs = [replace(job, new_tokens=min(job.new_tokens, max_tokens)) for job in jobs]
    if len({job.shape for job in jobs}) > 1:
        job_shapes = ", ".join(f"{job.name} has {job.shape}" for job in jobs)
        sys.exit(f"all jobs of a call must have the same shape, but {job_shapes}")
    return jobs


def find_max_sizes(jobs: list[Job]) -> tuple[int, int]:
    """Return how many samples a job can draw at once, and tokens of a prompt with them, at most."""
    return max(job.rows for job in jobs), max(job.longest for job in jobs)


def score_job(job: Job, run: int, score: Score) -> int:
    """Run a job of kind "score" and return how many tokens have log-probabilities."""
    groups = zip(job.prompts(run), job.continuations(run), strict=True)
    pairs = [
        (prompt, continuation) for prompt, continuations in groups for continuation in continuations
    ]
    numbers = score(pairs)
    lengths = [len(logprobs) for logprobs in numbers]
    assert lengths == [job.new_tokens] * len(pairs), "log-probabilities are missing"
    assert all(-math.inf < number <= 0 for logprobs in numbers for number in logprobs), "not finite"
    return sum(lengths)


def run_job(job: Job, run: int, generate: Generate) -> int:
    """Run a job, a call per step, and return how many tokens were drawn."""
    draws, tokens = random.Random(run), 0
    frontier = [[prompt] for prompt in job.prompts(run)]
    for _ in range(job.steps):
        open_nodes = [node for nodes in frontier for node in nodes]
        completions = generate(open_nodes, job.samples, job.new_tokens)
        lengths = [len(sample) for samples in completions for sample in samples]
        assert lengths == [job.new_tokens] * (len(open_nodes) * job.samples), "samples are missing"
        tokens += sum(lengths)
        answers, children = iter(zip(open_nodes, completions, strict=True)), []
        for nodes in frontier:
            node_samples = [next(answers) for _ in nodes]
            children.append([node + sample for node, samples in node_samples for sample in samples])
        frontier = [draws.sample(siblings, min(job.keep, len(siblings))) for siblings in children]
    return tokens


def config_of(shape: str) -> Any:
    """Return the transformers configuration of a shape."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**JOBS["shapes"][shape], bos_token_id=1, eos_token_id=2)


def save_tokenizer(folder: Path) -> None:
    """Write treegen's tokenizer of bytes, which structured jobs need in every engine."""
    from treegen.bench.shapes import byte_tokenizer

    byte_tokenizer().save_pretrained(folder)


def save_checkpoint(shape: str, folder: Path, weights: bool, dtype: str) -> None:
    """Write the configuration of a shape, and seeded random weights if asked."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    torch.manual_seed(0)
    with torch.device("cpu" if weights else "meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if weights:
        model.save_pretrained(folder)
    else:
        config.architectures, config.dtype = [type(model).__name__], dtype
        config.save_pretrained(folder)


def has_weights(folder: Path) -> bool:
    """Return whether a checkpoint has weights; without, engines make them up."""
    return any(folder.glob("*.safetensors"))


def gpu_query(fields: str) -> list[str]:
    """Return the command that prints fields of the visible GPUs."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return [*query, f"--id={cards}"] if cards else query


def used_mib() -> list[int]:
    """Return the memory in use on each visible GPU; empty where there is none."""
    query = gpu_query("memory.used")
    try:
        numbers = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        return list(map(int, numbers))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []


def memory() -> str:
    """Return the peak of this process, and what is in use on GPUs, pools included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    text = f"{peak / 2**30:.2f} GiB of RAM"
    used = used_mib()
    return f"{sum(used) / 1024:.1f} GiB of GPUs, {text}" if used else text


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: version(name) for name in packages}


def wait_for_turn() -> None:
    """Wait until this program may use the GPU, if `run_all.py` has started it."""
    while (turn := os.environ.get(TURN)) and not os.path.exists(turn):
        time.sleep(0.1)


def arguments() -> argparse.ArgumentParser:
    """Return the arguments that all runners share, once this program may run."""
    wait_for_turn()
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("jobs", help="a job of jobs.json, or more of its shape, by commas")
    parser.add_argument("checkpoint", type=Path, help="what workload.py wrote for this shape")
    parser.add_argument("--dtype", default="bfloat16", help="of weights")
    parser.add_argument("--tokens", type=int, help="new tokens of a sample, if fewer; for tuning")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs")
    parser.add_argument("--warm-ups", type=int, default=1, help="runs before, not timed")
    parser.add_argument(
        "--warm-up-tokens", type=int, help="new tokens of a sample in them, if fewer than the job's"
    )
    return parser


def measure(
    engine: str,
    versions: dict[str, str],
    settings: dict[str, Any],
    jobs: list[Job],
    options: argparse.Namespace,
    run: Callable[[Job, int], int],
) -> None:
    """Time `run`, which runs a job once and returns its tokens, and print a table for each job.

    CPU seconds are those of this process; an engine may have others.
    """
    for job in jobs:
        seconds, cpu_seconds, tokens = [], [], 0
        warm = options.warm_up_tokens if job.kind == "draw" else None
        short = replace(job, new_tokens=min(warm or job.new_tokens, job.new_tokens))
        for index in range(-options.warm_ups, options.repeats):
            start, cpu = time.perf_counter(), time.process_time()
            tokens = run(short if index < 0 else job, index)
            if index >= 0:
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu)
        speeds = sorted(tokens / run_seconds for run_seconds in seconds)
        named = ", ".join(f"{name} {number}" for name, number in versions.items())
        print(HEAD)
        print(
            f"| {job.name} | {engine} | {statistics.median(speeds):,.0f} "
            f"| {speeds[0]:,.0f}-{speeds[-1]:,.0f} of {len(speeds)} "
            f"| {statistics.median(seconds):.2f} | {statistics.median(cpu_seconds):.2f} "
            f"| {tokens:,} | {memory()} | {named} |\n"
        )
        print(f"settings: {json.dumps(settings | {'dtype': options.dtype})}")
        load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
        print(
            f"machine: {platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} "
            f"cores, load {load}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}"
        )
        print(f"command: {shlex.join(['python', *sys.argv])}")
        print(f"date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", flush=True)


def main() -> None:
    """Write the checkpoint of a job."""
    parser = argparse.ArgumentParser(description="Write the checkpoint of a job.")
    parser.add_argument("job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config-only", action="store_true", help="no weights")
    parser.add_argument("--dtype", default="bfloat16", help="of weights")
    options = parser.parse_args()
    job = job_of(options.job)
    shape = job.shape
    save_checkpoint(shape, options.folder, not options.config_only, options.dtype)
    if job.kind == "structured":
        save_tokenizer(options.folder)
    print(f"{options.folder}: {shape}, {options.dtype}")


if __name__ == "__main__":
    main()
