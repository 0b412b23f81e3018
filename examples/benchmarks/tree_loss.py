"""The loss of rollouts below one prompt: a tree, a batch of repeated prompts, and one by one.

Each way computes log-probabilities of the completions and the gradients of all weights, in a
process of its own. Memory is the peak of the step without what the process had before: activations,
logits and temporary memory, but neither weights nor gradients. On a GPU, times are medians of five
steps. The attention of a layer over the tree is also measured alone. The roofline is the time of
the step's matrix products at the device's rate. The figures of docs/benchmarks/features.md come
from

    python examples/benchmarks/tree_loss.py --shape smollm2-360m --layers 4
    python examples/benchmarks/tree_loss.py --shape llama3.2-1b
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np
import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.shapes import load_or_build
from treegen.bench.timing import Stopwatch, synchronize
from treegen.cli.bench import measure_rates
from treegen.cli.bench.options import DEVICE, int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.common.formatting import format_bytes
from treegen.errors import InputError
from treegen.model.training.tree_logprobs import pack_tree
from treegen.ops.attention.tree import attend_tree
from treegen.ops.attention.types import AttentionOptions
from treegen.report.tables import PrintableTable
from treegen.train import tree_logprobs, tree_of

_STEPS: Final = {"cpu": 1, "cuda": 5}
"""Number of timed steps, by type of device."""
TREE, REPEATED, SINGLE = "tree", "repeated batch", "one by one"


@dataclass(frozen=True, slots=True)
class LossJob:
    """The sizes of a job, and its model."""

    shape: str | None
    """The shape of a model with random weights; None for a checkpoint."""
    model: str | None
    """The checkpoint; None for a shape."""
    layers: int | None
    """Layers of the shape; None for all."""
    device: str
    """The device."""
    dtype: str
    """The type of the weights."""
    rollouts: int
    """Completions below one prompt."""
    tokens: int
    """Tokens of a completion."""
    prompt: int
    """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """The time of the attention of one layer over the tree."""

    name: str
    """The direction: forward or backward."""
    microseconds: float
    """Median of calls with cold caches."""
    flops: float
    """Operations of its matrix products. Scores that a kernel computes again count once."""

    def describe(self, rates: Ceilings) -> str:
        """Return the time, and the rate of the products against that of a large product.

        Args:
            rates: The ceilings of the device.
        """
        rate = 1e6 * self.flops / self.microseconds
        return (
            f"{self.name} {self.microseconds:,.0f} us, {rate / 1e9:,.0f} GFLOP/s "
            f"({rate / rates.matmul:.0%} of a large product)"
        )


@dataclass(frozen=True, slots=True)
class LossResult:
    """The cost of a step in one way."""

    name: str
    """The way."""
    seconds: float
    """Time of a step."""
    processor_seconds: float
    """Processor time of all threads."""
    peak_bytes: int
    """The most memory during the step, beyond the memory before it."""
    loss: float
    """The sum of all log-probabilities."""
    grad_norm: float
    """The length of the gradient of all weights."""
    flops: float
    """Operations of the step's matrix products."""
    attention: tuple[AttentionTime, ...] = ()
    """The attention of a layer over the tree; empty for the other ways."""


def measure(name: str, job: LossJob) -> LossResult:
    """Time one step in one way, after a short one.

    Args:
        name: The way.
        job: The sizes.
    """
    loaded, _ = load_or_build(
        job.shape, job.model, layers=job.layers, dtype=job.dtype, device=job.device
    )
    module: Any = loaded.module.requires_grad_(True).train()
    module.set_attn_implementation("sdpa")
    rng, vocabulary = np.random.default_rng(0), loaded.spec.vocab_size
    prompt = rng.integers(2, vocabulary, job.prompt).tolist()
    texts = [prompt + rng.integers(2, vocabulary, job.tokens).tolist() for _ in range(job.rollouts)]
    step = {TREE: _tree_step, REPEATED: _repeated_step, SINGLE: _single_step}[name]
    step(module, [text[-8:] for text in texts], 4)  # also allocates the gradients
    times, num_steps = [], _STEPS[loaded.device.type]
    for _ in range(num_steps + (num_steps > 1)):  # the first of several compiles kernels
        module.zero_grad(set_to_none=False)
        synchronize(loaded.device)
        peak = _PeakMemory(loaded.device)
        clock, processor = time.perf_counter(), time.process_time()
        loss = step(module, texts, job.prompt)
        synchronize(loaded.device)
        times.append((time.perf_counter() - clock, time.process_time() - processor))
    seconds, processor = (median(part) for part in zip(*times[-num_steps:], strict=True))
    grads = [
        weight.grad.float().norm() for weight in module.parameters() if weight.grad is not None
    ]
    peak_bytes = peak.read()
    return LossResult(
        name=name,
        seconds=seconds,
        processor_seconds=processor,
        peak_bytes=peak_bytes,
        loss=loss,
        grad_norm=float(torch.stack([grad.float().norm() for grad in grads]).norm()),
        flops=_count_flops(module, job, shares_prompt=name == TREE),
        attention=time_attention(module, job, 4 * num_steps) if name == TREE else (),
    )


def _tree_step(module: Any, texts: Sequence[list[int]], prompt: int) -> float:
    logprobs = tree_logprobs(module, tree_of(texts), prompt_lengths=[prompt] * len(texts))
    loss = torch.cat(logprobs).sum()
    loss.backward()
    return float(loss.detach())


def _repeated_step(module: Any, texts: Sequence[list[int]], prompt: int) -> float:
    ids = torch.tensor(texts, device=module.device)
    num = ids.shape[1] - prompt
    logits = module(input_ids=ids, use_cache=False, logits_to_keep=num + 1).logits[:, :-1]
    # As TRL does it: the token's logit without those of all others, row by row.
    chosen = logits.gather(-1, ids[:, -num:, None])[..., 0]
    lse = torch.stack([row.float().logsumexp(-1) for row in logits])
    loss: Tensor = (chosen - lse).sum()
    loss.backward()
    return float(loss.detach())


def _single_step(module: Any, texts: Sequence[list[int]], prompt: int) -> float:
    return sum(_repeated_step(module, [text], prompt) for text in texts)


def _count_pairs(job: LossJob, *, shares_prompt: bool) -> int:
    """Return the number of pairs of a token and a token that it sees."""
    length = job.prompt + job.tokens
    prompts = job.rollouts - 1 if shares_prompt else 0
    return job.rollouts * length * (length + 1) // 2 - prompts * job.prompt * (job.prompt + 1) // 2


def _count_flops(module: Any, job: LossJob, *, shares_prompt: bool) -> float:
    """Return the operations of a step, if all weights but embeddings are factors of all tokens."""
    config, head = module.config, module.get_output_embeddings().weight
    ends = job.rollouts * job.tokens
    num_tokens = ends + job.prompt * (1 if shares_prompt else job.rollouts)
    weights = {id(weight): weight.numel() for weight in module.parameters() if weight.ndim > 1}
    for weight in (head, module.get_input_embeddings().weight):
        weights.pop(id(weight), None)
    products: int = sum(weights.values()) * num_tokens + head.numel() * ends
    width: int = config.num_attention_heads * getattr(config, "head_dim", 0)
    pairs = _count_pairs(job, shares_prompt=shares_prompt)
    # A product has two operations forward and four backward. Scores are computed again backward, so
    # attention has two products forward and five backward.
    return float(6 * products + 14 * width * pairs * config.num_hidden_layers)


def time_attention(module: Any, job: LossJob, repeats: int) -> tuple[AttentionTime, ...]:
    """Time the attention of one layer over the tree, forward and backward.

    Args:
        module: The model.
        job: The sizes.
        repeats: Number of timed calls.
    """
    config, device = module.config, module.device
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    prompt = [2] * job.prompt
    layout = pack_tree(
        tree_of([prompt + [3 + at] * job.tokens for at in range(job.rollouts)])
    ).layout
    generator = torch.Generator(device).manual_seed(0)
    sizes: Any = {"generator": generator, "device": device, "dtype": module.dtype}
    q, k, v, grad = (
        torch.randn(num, layout.num_tokens, width, **sizes).requires_grad_()
        for num in (heads, groups, groups, heads)
    )

    def attend() -> Tensor:
        return attend_tree(q, k, v, layout, AttentionOptions(width**-0.5))

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), (q, k, v), grad)

    watch = Stopwatch(device)
    forward, both = (watch.microseconds(call, repeats).median for call in (attend, differentiate))
    flops = 2.0 * heads * width * _count_pairs(job, shares_prompt=True)
    return (
        AttentionTime("forward", forward, 2 * flops),
        AttentionTime("backward", both - forward, 5 * flops),
    )


class _PeakMemory:
    """The peak of a process's memory, or of a GPU's, from now on."""

    _STATUS: Final = Path("/proc/self/status")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._before = self._field("VmRSS")

    def read(self) -> int:
        """Return the bytes beyond those at the start."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._field("VmHWM") - self._before

    def _field(self, name: str) -> int:
        lines = self._STATUS.read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(name + ":"))
        return 1024 * int(line.split()[1])


def _measure_alone(name: str, job: LossJob) -> LossResult:
    """Measure in a process of its own, whose peak is that of this way alone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, job).result()


def loss_table(results: list[LossResult], rates: Ceilings) -> PrintableTable:
    """Return a table with a row for each way; the first is the tree's.

    Args:
        results: The results.
        rates: The ceilings of the device.
    """
    first = results[0]

    def times(read: Callable[[LossResult], float]) -> Callable[[LossResult], str]:
        return lambda r: "" if r is first else f"{read(r) / read(first):.1f}"

    return PrintableTable.of(
        results,
        {
            "way": "{0.name}",
            "s": "{0.seconds:,.2f}",
            "times": times(lambda r: r.seconds),
            "of roofline": lambda r: f"{r.flops / rates.matmul / r.seconds:.0%}",
            "processor s": "{0.processor_seconds:,.2f}",
            "times the tree's": times(lambda r: r.processor_seconds),
            "peak memory": lambda r: format_bytes(r.peak_bytes),
            "times the tree's memory": times(lambda r: r.peak_bytes),
            "log-probability": "{0.loss:,.2f}",
            "norm of gradient": "{0.grad_norm:,.3f}",
        },
        words=["way"],
    )


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: tiny.")
@int_option("--layers", None, "Layers of the shape, in place of all.", metavar="N")
@click.option("--model", metavar="DIR|NAME", help="A checkpoint instead of a shape.")
@int_option("--rollouts", 8, "Completions below one prompt.")
@int_option("--tokens", 256, "Tokens of each completion.", minimum=4)
@int_option("--prompt", 2048, "Tokens of the prompt.", minimum=4)
@add_options(*DEVICE)
def main(
    shape: str | None,
    model: str | None,
    layers: int | None,
    rollouts: int,
    tokens: int,
    prompt: int,
    **options: Any,
) -> None:
    """Compare the time and memory of a training step on a tree with repeated prompts."""
    shape = shape_or_model(shape, model, "tiny")
    if layers is not None and model:
        raise InputError("--layers cannot be used together with --model; remove --layers")
    _, _, machine, rates = measure_rates(**options)
    where = options["device"], options["dtype"]
    job = LossJob(shape, model, layers, *where, rollouts, tokens, prompt)
    results = []
    for name in (TREE, REPEATED, SINGLE):
        results.append(_measure_alone(name, job))
        notice(f"{name}: {results[-1].seconds:,.2f} s")
    echo(f"{shape or model}; {rollouts} rollouts of {tokens} tokens below {prompt:,}\n")
    print_table(loss_table(results, rates))
    parts = "; ".join(part.describe(rates) for part in results[0].attention)
    echo(f"attention of a layer over the tree: {parts}")
    json_line(
        {
            "bench": "tree loss",
            "machine": machine,
            "ceilings": rates,
            "job": job,
            "results": results,
        }
    )


if __name__ == "__main__":
    main()
