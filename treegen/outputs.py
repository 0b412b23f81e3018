"""What sampling returns: completions, scores, and an account of the work. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

FinishReason = Literal["stop", "length"]
OWN_KEYS: Final = "own keys"
"""The name of a decode step's last level: what each row reads for itself."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample.

    prompt_id, sample_index: which sample of which prompt.
    seed: what its draws were made from: a function of the run seed, the prompt (its id, or its
    tokens where it has none) and the number of its samples before this one.
    text: what was generated, cut before the stop string and without special tokens.
    tokens: every generated token id, those of the stop included.
    logprobs: natural-log probability of each token under the model, before temperature.
    finish_reason: "stop" (a stop string, a stop token or end of sequence) or "length".
    stop: the stop string or stop token id that ended it (a string that is a special token is told
    as the string, the model's own end as its id); None for "length".
    top_logprobs: per token the likeliest (token id, logprob) pairs, if asked for.
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

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole completion under the model."""
        return sum(self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, those of the stop included."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one continuation given its context.

    tokens, logprobs: the continuation's token ids and their natural-log probabilities.
    is_greedy: every token is the model's likeliest.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Status:
    """What is under way now. rows: decoded at once. pages: in use, of num_pages."""

    rows: int
    pages: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LevelRows:
    """One level of the tree at work now.

    segments: shared spans of tokens that rows being decoded lie below. rows: those rows.
    kept: the rows that read their span as one attention part with others.
    """

    depth: int
    segments: int
    rows: int
    kept: int


@dataclass(slots=True)
class Usage:
    """What a run computed, and what the same samples would have cost apart.

    prompt_tokens_computed: prompt tokens that went through the model.
    prompt_tokens_reused: prompt tokens whose keys and values were kept from an earlier call.
    prompt_tokens_unshared: prompt tokens that one prompt per sample would have computed.
    decoded_tokens: generated tokens of finished and live samples.
    recomputed_tokens: tokens computed again after their pages were taken for other work.
    key_tokens_read, key_tokens_unshared: keys read per layer in decode steps, and what reading
    each row's whole context would have read.
    impl: the attention implementation. kernels: by level, in how many decode steps which of its
    kernels read it; levels are what is read once for all rows below, "level 0" nearest the root,
    and last "own keys", which every row reads for itself.
    eager_because: why decode steps were not replayed as CUDA graphs though they were wanted; empty
    if they were, or on a CPU. uncompiled_because: why layers ran uncompiled, likewise.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    prompt_tokens_unshared: int = 0
    decoded_tokens: int = 0
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

    def count_kernels(self, names: Sequence[str]) -> None:
        """Note a decode step; names: the kernel of each level, from the root to the rows' own."""
        last = len(names) - 1
        for place, name in enumerate(names):
            steps = self.kernels.setdefault(f"level {place}" if place < last else OWN_KEYS, {})
            steps[name] = steps.get(name, 0) + 1


def in_order(levels: Iterable[str]) -> list[str]:
    """Names of levels as `Usage.kernels` has them, from the root to the rows' own keys."""
    return sorted(levels, key=lambda level: (level == OWN_KEYS, len(level), level))
