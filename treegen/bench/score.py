"""Texts scored below one prompt on a CPU, with the likeliest tokens, beside transformers.

transformers computes the prompt again for each text, and by default the logits of all its tokens.
So it is timed on one text twice: as it is, and asked for the logits of the text alone. The time
that counts is that of the processor, for others may use the machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from treegen.bench.decoding.roofline import ModelSize, size_of
from treegen.llm import LLM
from treegen.model.hook import ATTENTION
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.common.outputs import Score

_Found = TypeVar("_Found")
_STOCK: Final = "sdpa"


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Texts of `tokens` tokens below a prompt of `prefix`; the `top` likeliest in each place."""

    texts: int
    tokens: int
    prefix: int
    top: int


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations for one text, in units of 10^9: its part of a shared prompt's."""

    layers: float
    attention: float
    logits: float

    @property
    def all(self) -> float:
        """Those of the whole."""
        return self.layers + self.attention + self.logits


@dataclass(frozen=True, slots=True)
class ScoreTime:
    """What one way took for each text.

    texts: that were timed.
    seconds: by the clock; processor_seconds: of all threads.
    counted: what it computes; None where the model is of another kind than those that are counted.
    off: how far a log-probability is from treegen's at most.
    """

    name: str
    texts: int
    seconds: float
    processor_seconds: float
    counted: FlopCount | None
    off: float = 0.0


def measure(llm: LLM, job: ScoreJob) -> Iterator[ScoreTime]:
    """Time treegen, then transformers with the logits of the text, then with all. All on a CPU.

    Each meets a short text first, untimed.

    Raises:
        CapacityError: the prompt with a text does not fit.
    """
    rng, vocabulary = np.random.default_rng(0), llm.spec.vocab_size
    prompt = rng.integers(2, vocabulary, job.prefix).tolist()
    texts = rng.integers(2, vocabulary, (job.texts, job.tokens)).tolist()
    llm.score([(prompt[:4], texts[0][:4])], top=job.top)
    scores, took = _time_call(lambda: llm.score([(prompt, text) for text in texts], top=job.top))
    seconds, processor = (each / job.texts for each in took)
    counted = _count(llm, job, job.texts, wanted=True)
    yield ScoreTime("treegen", job.texts, seconds, processor, counted)
    module: Any = llm.model.module
    module.set_attn_implementation(_STOCK)
    try:
        _stock(module, prompt[:4], texts[0][:4], job.top, wanted=True)
        for wanted in (True, False):
            found, took = _time_call(
                lambda how=wanted: _stock(  # type: ignore[misc]
                    module, prompt, texts[0], job.top, wanted=how
                )
            )
            name = f"transformers, {'logits of the text' if wanted else 'all logits'}"
            counted = _count(llm, job, 1, wanted=wanted)
            yield ScoreTime(name, 1, *took, counted, _off(found, scores[0]))
    finally:
        module.set_attn_implementation(ATTENTION)


def score_table(times: list[ScoreTime]) -> PrintableTable:
    """A row for each way; the first is treegen's."""
    first = times[0]

    def format_count(part: str) -> Callable[[ScoreTime], str]:
        return lambda t: f"{getattr(t.counted, part):,.0f}" if t.counted else ""

    def times_counted(each: ScoreTime) -> str:
        if each is first or each.counted is None or first.counted is None:
            return ""
        return f"{each.counted.all / first.counted.all:.1f}"

    def times_first(each: ScoreTime) -> str:
        return "" if each is first else f"{each.processor_seconds / first.processor_seconds:.1f}"

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
            "off by": lambda each: "" if each is first else f"{each.off:.1e}",
        },
        words=["For each text"],
    )


def _count(llm: LLM, job: ScoreJob, texts: int, *, wanted: bool) -> FlopCount | None:
    """The operations of one of `texts` texts that share the prompt's. wanted: few logits are."""
    size = size_of(llm.model)
    if not isinstance(size, ModelSize) or size.experts is not None or llm.spec.state_bytes:
        return None
    if any(layer.latent is not None for layer in size.layers):
        return None
    pairs = job.prefix * (job.prefix + 1) / 2 / texts
    pairs += job.tokens * job.prefix + job.tokens * (job.tokens + 1) / 2
    tokens = job.prefix / texts + job.tokens
    widths = size.q_heads * sum(layer.k_dim + layer.v_dim for layer in size.layers)
    logits = size.hidden * size.vocab_size * (job.tokens if wanted else tokens)
    return FlopCount(2e-9 * size.layer_weights * tokens, 2e-9 * widths * pairs, 2e-9 * logits)


def _stock(
    module: Any, prompt: list[int], text: list[int], top: int, *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a text's tokens, and the largest ones in the place of each."""
    ids = torch.tensor([prompt + text])
    fewer = {"logits_to_keep": len(text) + 1} if wanted else {}
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=False, **fewer).logits[0, -len(text) - 1 : -1]
        told = logits.float().log_softmax(dim=-1)
        own = told.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return own, told.topk(min(top, told.shape[1]), dim=-1).values


def _off(found: tuple[Tensor, Tensor], score: Score) -> float:
    own, likeliest = (each.numpy() for each in found)
    apart = [np.abs(own - np.array(score.logprobs)).max()]
    if score.top is not None:
        apart.append(np.abs(likeliest - score.top.logprobs).max())
    return float(max(apart))


def _time_call(call: Callable[[], _Found]) -> tuple[_Found, tuple[float, float]]:
    """What a call returns, and its seconds by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    found = call()
    return found, (time.perf_counter() - clock, time.process_time() - processor)
