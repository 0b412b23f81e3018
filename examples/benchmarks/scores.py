"""Scoring of texts below one prompt on a CPU, with the most likely tokens, against transformers.

transformers computes the prompt again for each text, and by default the logits of all its tokens.
So it is timed on one text twice: with its defaults, and with the logits of the text alone. The
benchmark compares processor time, because other programs may use the machine too. The figures of
docs/benchmarks/features.md come from

    python examples/benchmarks/scores.py --shape llama3.2-1b
    python examples/benchmarks/scores.py --shape smollm2-360m --layers 4
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import numpy as np
import torch
from torch import Tensor

from treegen.bench.roofline import ModelSize, size_of
from treegen.bench.shapes import load_or_build
from treegen.bench.timing import describe_machine, headline
from treegen.cli.bench.options import int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.errors import InputError
from treegen.llm import LLM
from treegen.model.attention_hook import ATTENTION
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.common.outputs import Score

_Result = TypeVar("_Result")
_STOCK: Final = "sdpa"


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """The sizes of a job.

    texts: number of texts. tokens: tokens of each text. prefix: tokens of the prompt. top:
    most likely tokens reported at each position.
    """

    texts: int
    tokens: int
    prefix: int
    top: int


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations for one text in units of 10^9, including its share of a shared prompt."""

    layers: float
    attention: float
    logits: float

    @property
    def all(self) -> float:
        """The total."""
        return self.layers + self.attention + self.logits


@dataclass(frozen=True, slots=True)
class ScoreTime:
    """The time of one way to score, per text.

    texts: number of texts that were timed.
    seconds: wall-clock time; processor_seconds: processor time of all threads.
    counted: its operations; None for models whose operations cannot be counted.
    off: largest difference of a log-probability from treegen's.
    """

    name: str
    texts: int
    seconds: float
    processor_seconds: float
    counted: FlopCount | None
    off: float = 0.0


def measure(llm: LLM, job: ScoreJob) -> Iterator[ScoreTime]:
    """Time on a CPU treegen, then transformers with the text's logits, then with all logits.

    Each way first scores a short text, untimed.

    Raises:
        CapacityError: the prompt with a text does not fit.
    """
    rng, vocabulary = np.random.default_rng(0), llm.spec.vocab_size
    prompt = rng.integers(2, vocabulary, job.prefix).tolist()
    texts = rng.integers(2, vocabulary, (job.texts, job.tokens)).tolist()
    llm.score([(prompt[:4], texts[0][:4])], top=job.top)
    scores, took = _time_call(lambda: llm.score([(prompt, text) for text in texts], top=job.top))
    seconds, processor = (total / job.texts for total in took)
    counted = _count(llm, job, job.texts, text_only=True)
    yield ScoreTime("treegen", job.texts, seconds, processor, counted)
    module: Any = llm.model.module
    module.set_attn_implementation(_STOCK)
    try:
        _stock(module, prompt[:4], texts[0][:4], job.top, text_only=True)
        for text_only in (True, False):
            logprobs, took = _time_call(
                lambda how=text_only: _stock(  # type: ignore[misc]
                    module, prompt, texts[0], job.top, text_only=how
                )
            )
            name = f"transformers, {'logits of the text' if text_only else 'all logits'}"
            counted = _count(llm, job, 1, text_only=text_only)
            yield ScoreTime(name, 1, *took, counted, _off(logprobs, scores[0]))
    finally:
        module.set_attn_implementation(ATTENTION)


def score_table(times: list[ScoreTime]) -> PrintableTable:
    """Return a table with a row for each way to score; the first is treegen's."""
    first = times[0]

    def format_count(part: str) -> Callable[[ScoreTime], str]:
        return lambda t: f"{getattr(t.counted, part):,.0f}" if t.counted else ""

    def times_counted(time: ScoreTime) -> str:
        if time is first or time.counted is None or first.counted is None:
            return ""
        return f"{time.counted.all / first.counted.all:.1f}"

    def times_first(time: ScoreTime) -> str:
        return "" if time is first else f"{time.processor_seconds / first.processor_seconds:.1f}"

    return PrintableTable.of(
        times,
        {
            "For each text": "{0.name}",
            "texts": "{0.texts}",
            "processor s": "{0.processor_seconds:,.2f}",
            "s": "{0.seconds:,.2f}",
            "times treegen's": times_first,
            "by count": times_counted,
            "GFLOP of layers": format_count("layers"),
            "of attention": format_count("attention"),
            "of logits": format_count("logits"),
            "off by": lambda time: "" if time is first else f"{time.off:.1e}",
        },
        words=["For each text"],
    )


def _count(llm: LLM, job: ScoreJob, texts: int, *, text_only: bool) -> FlopCount | None:
    """Return the operations of one of `texts` texts that share a prompt; None if not countable.

    text_only: whether only the text's logits are computed.
    """
    size = size_of(llm.model)
    if not isinstance(size, ModelSize) or size.experts is not None or llm.spec.state_bytes:
        return None
    if any(layer.latent is not None for layer in size.layers):
        return None
    pairs = job.prefix * (job.prefix + 1) / 2 / texts
    pairs += job.tokens * job.prefix + job.tokens * (job.tokens + 1) / 2
    tokens = job.prefix / texts + job.tokens
    widths = size.q_heads * sum(layer.k_dim + layer.v_dim for layer in size.layers)
    logits = size.hidden * size.vocab_size * (job.tokens if text_only else tokens)
    return FlopCount(2e-9 * size.layer_weights * tokens, 2e-9 * widths * pairs, 2e-9 * logits)


def _stock(
    module: Any, prompt: list[int], text: list[int], top: int, *, text_only: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of a text's tokens, and the largest ones at each position."""
    ids = torch.tensor([prompt + text])
    fewer = {"logits_to_keep": len(text) + 1} if text_only else {}
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=False, **fewer).logits[0, -len(text) - 1 : -1]
        logprobs = logits.float().log_softmax(dim=-1)
        of_text = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return of_text, logprobs.topk(min(top, logprobs.shape[1]), dim=-1).values


def _off(logprobs: tuple[Tensor, Tensor], score: Score) -> float:
    of_text, most_likely = (values.numpy() for values in logprobs)
    differences = [np.abs(of_text - np.array(score.logprobs)).max()]
    if score.top is not None:
        differences.append(np.abs(most_likely - score.top.logprobs).max())
    return float(max(differences))


def _time_call(call: Callable[[], _Result]) -> tuple[_Result, tuple[float, float]]:
    """Return the result of a call, and its wall-clock and processor seconds."""
    clock, processor = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - clock, time.process_time() - processor)


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: llama3.2-1b.")
@int_option("--layers", None, "Layers of the shape, in place of all.", metavar="N")
@click.option("--model", metavar="DIR|NAME", help="A checkpoint instead of a shape.")
@int_option("--texts", 64, "Texts below one prompt.")
@int_option("--tokens", 512, "Tokens of each text.")
@int_option("--prefix", 8192, "Tokens of the prompt.")
@int_option("--top", 256, "Likeliest tokens in the place of each token.", minimum=0)
@JSON
def main(shape: str | None, model: str | None, layers: int | None, **sizes: int) -> None:
    """Score texts below one prompt on a CPU and with transformers: seconds per text, and counts."""
    shape = shape_or_model(shape, model, "llama3.2-1b")
    if layers is not None and model:
        raise InputError("--layers cannot be used together with --model; remove --layers")
    loaded, tokenizer = load_or_build(shape, model, layers=layers, dtype="float32", device="cpu")
    llm, job = LLM(loaded, tokenizer=tokenizer), ScoreJob(**sizes)
    machine, spec = describe_machine(loaded.device), loaded.spec
    num_layers = loaded.module.config.get_text_config(decoder=True).num_hidden_layers
    echo(
        f"{headline(machine)}, {spec.name}, {num_layers} layers, vocabulary {spec.vocab_size:,}\n"
        f"{job.texts} texts of {job.tokens} tokens below {job.prefix:,}, {job.top} most likely\n"
    )
    times = []
    for result in measure(llm, job):
        notice(f"{result.name}: {result.processor_seconds:,.2f} processor seconds for each text")
        times.append(result)
    loaded.close()
    print_table(score_table(times))
    json_line(
        {
            "bench": "score",
            "machine": machine,
            "model": spec.name,
            "layers": num_layers,
            "job": job,
            "results": times,
        }
    )


if __name__ == "__main__":
    main()
