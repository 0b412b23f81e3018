"""What sampling returns: completions, scores, and an account of the work. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "confidence", "error"]
OWN_KEYS: Final = "own keys"
"""The name of the last level of a decode step, which each row reads for itself."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where the reasoning of a sample ends, and its answer begins.

    num_tokens: tokens of the thinking, both tags included.
    end: characters of the sample's text that are thinking, tags included.
    is_closed: whether it came to its end; else there is no answer.
    is_forced: whether it was closed because its budget (`max_thinking_tokens`) was used up.
    """

    num_tokens: int
    end: int
    is_closed: bool
    is_forced: bool = False


def answer_after(text: str, thinking: Thinking | None) -> str:
    """The part of a sample's text that is its answer; empty if the thinking never ended."""
    return text if thinking is None else text[thinking.end :].lstrip("\n")


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The likeliest tokens in the place of each of some tokens.

    tokens: int32 [N, K], the likeliest first. logprobs: float32 [N, K], natural logarithms.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def pairs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """(token id, logprob) pairs for each token, as `Completion.top_logprobs` has them."""
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        return tuple(tuple(zip(*row, strict=True)) for row in rows)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one continuation given its context.

    tokens: the token ids of the continuation.
    logprobs: the natural-log probability of each.
    is_greedy: whether every token is the model's likeliest.
    top: the likeliest tokens in the place of each, if they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool
    top: TopLogprobs | None = field(default=None, compare=False)

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample.

    prompt_id: the id of its prompt.
    sample_index: its number among the samples of the prompt, from 0.
    seed: the seed of its draws. It follows from the seed of the run, the prompt's id (or tokens, if
    it has no id) and the number of samples of the prompt before this one.
    text: what was generated, cut before the stop string and without special tokens.
    tokens: all generated token ids, those of the stop included.
    logprobs: natural-log probability of each token under the model, before temperature, unless
    `SamplingParams.logprobs_mode` asks for that of the draw.
    finish_reason: "stop" (a stop string, a stop token or end of sequence), "length", "confidence"
    (it became less confident than `SamplingParams.min_confidence`), or "error" (its structure, such
    as a grammar, allows no further token or is too much for llguidance; a warning says why).
    stop: the stop string or the stop token id that ended it; None for other reasons. A stop string
    that is a special token is given as the string, the model's own end of sequence as its id.
    top_logprobs: for each token the likeliest (token id, logprob) pairs, if asked for.
    confidences: the confidence at each token, if asked for; see `SamplingParams.confidence`.
    certainties: the self-certainty at each token, if asked for.
    thinking: where the thinking in it ends, if it has one and `reasoning_tags` tell.
    prompt_logprobs: those of the prompt's tokens but the first, if `SamplingParams.prompt_logprobs`
    asks for them. All samples of a prompt have the same object.
    """

    prompt_id: str
    sample_index: int
    seed: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    confidences: tuple[float, ...] = ()
    certainties: tuple[float, ...] = ()
    thinking: Thinking | None = None
    prompt_logprobs: Score | None = None

    @property
    def answer(self) -> str:
        """The text after the thinking; empty if the thinking never ended."""
        return answer_after(self.text, self.thinking)

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole completion under the model."""
        return sum(self.logprobs)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens, by vLLM's name."""
        return self.tokens

    @property
    def num_tokens(self) -> int:
        """Generated tokens, those of the stop included."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Status:
    """What is under way now.

    rows: samples that are being decoded.
    pages: pages in use.
    num_pages: pages of the cache.
    """

    rows: int
    pages: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker of a cluster now.

    where: its machine. tokens: decoded in this run. tokens_per_second: of late. deaths: how often
    its process was lost.
    """

    name: str
    where: str
    tokens: int
    tokens_per_second: float
    rows: int
    pages: int
    num_pages: int
    deaths: int

    def __str__(self) -> str:
        return (
            f"{self.name} {self.tokens_per_second:,.0f} tokens/s, {self.rows:,} rows, "
            f"{self.pages:,}/{self.num_pages:,} pages"
        )


@dataclass(frozen=True, slots=True)
class LevelRows:
    """One level of the tree at work now.

    depth: segments above it, from 0.
    segments: the segments of this depth that have rows below them.
    rows: those rows.
    kept: those of the rows whose segment of this depth is kept.
    """

    depth: int
    segments: int
    rows: int
    kept: int


@dataclass(slots=True)
class Usage:
    """What a run computed, and what its samples would have taken without sharing.

    prompt_tokens_computed: prompt tokens that went through the model.
    prompt_tokens_reused: prompt tokens whose keys and values were kept from an earlier call.
    prompt_tokens_unshared: prompt tokens if each sample had computed its own prompt.
    images_encoded: images that went through the model's tower.
    decoded_tokens: generated tokens of finished and live samples.
    drafted_tokens, accepted_tokens: tokens that were guessed, and those of them that were drawn.
    recomputed_tokens: tokens that were computed again after their pages had been taken away.
    prefill_steps, decode_steps: passes of each kind.
    preemptions: how often a row lost its pages to other rows.
    peak_rows, peak_pages: most rows and pages that were in use at a time.
    num_pages, page_size: pages of the cache, and tokens of a page.
    key_tokens_read: keys that decode steps read in each layer.
    key_tokens_unshared: keys that they would have read if each row read its whole context.
    seconds, prefill_seconds, decode_seconds: time in all, and of each kind of pass.
    impl: the attention implementation.
    kernels: for each level, in how many decode steps which kernel read it. "level 0" is nearest the
    root. The last level is "own keys", which each row reads for itself.
    eager_because: why decode steps were not replayed as CUDA graphs; empty where they were, where
    they were not wanted, and on a CPU.
    uncompiled_because: why layers ran uncompiled, likewise.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    prompt_tokens_unshared: int = 0
    images_encoded: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    peak_rows: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    page_size: int = 0
    key_tokens_read: int = 0
    key_tokens_unshared: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    impl: str = ""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    eager_because: str = ""
    uncompiled_because: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over the whole run's time, prefill included."""
        return self.decoded_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row draws in a pass on average: 1 without guesses that were accepted."""
        passes = self.decoded_tokens - self.accepted_tokens
        return self.decoded_tokens / passes if passes > 0 else 1.0

    def count_kernels(self, names: Sequence[str]) -> None:
        """Count a decode step. names: the kernel of each level, from the root to the rows' own."""
        last = len(names) - 1
        for place, name in enumerate(names):
            steps = self.kernels.setdefault(f"level {place}" if place < last else OWN_KEYS, {})
            steps[name] = steps.get(name, 0) + 1


def in_order(levels: Iterable[str]) -> list[str]:
    """Names of levels as `Usage.kernels` has them, from the root to the rows' own keys."""
    return sorted(levels, key=lambda level: (level == OWN_KEYS, len(level), level))
