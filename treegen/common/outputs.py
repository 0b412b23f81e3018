"""Results of sampling: completions, scores, status and usage. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from treegen.common.formatting import safe_text

FinishReason = Literal["stop", "length", "confidence", "error"]
OWN_KEYS: Final = "own keys"
"""Name of the last level of a decode step, which each row reads separately."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning in a sample, which comes before its answer."""

    num_tokens: int
    """Number of tokens of the reasoning, including both tags."""
    end: int
    """Number of characters of the sample's text that are reasoning, including the tags."""
    is_closed: bool
    """Whether the reasoning ended; otherwise there is no answer."""
    is_forced: bool = False
    """Whether it was ended because its budget (`max_thinking_tokens`) was used up."""


def answer_after(text: str, thinking: Thinking | None) -> str:
    """Return the answer in a sample's text; empty if the reasoning never ended."""
    return text if thinking is None else text[thinking.end :].lstrip("\n")


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The most likely tokens at each of N positions."""

    tokens: NDArray[np.int32]
    """int32 [N, K], most likely first."""
    logprobs: NDArray[np.float32]
    """float32 [N, K], natural logarithms."""

    def pairs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return (token id, logprob) pairs for each position, as in `Completion.top_logprobs`."""
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        return tuple(tuple(zip(*row, strict=True)) for row in rows)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one continuation given its context."""

    tokens: tuple[int, ...]
    """The token ids of the continuation."""
    logprobs: tuple[float, ...]
    """The natural-log probability of each token."""
    is_greedy: bool
    """Whether every token is the model's most likely."""
    top: TopLogprobs | None = field(default=None, compare=False)
    """The most likely tokens at each position, if requested."""

    @classmethod
    def of_no_tokens(cls, num_top: int) -> Score:
        """Return the score of an empty continuation, with `num_top` most likely tokens at none."""
        shape = 0, num_top
        top = TopLogprobs(np.empty(shape, np.int32), np.empty(shape, np.float32))
        return cls((), (), True, top if num_top else None)

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole continuation."""
        return sum(self.logprobs)

    def __repr__(self) -> str:
        return (
            f"Score(logprob={self.logprob:.4f}, {len(self.tokens):,} tokens, "
            f"is_greedy={self.is_greedy})"
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample. Sequences with one item per token are as long as `tokens`."""

    prompt_id: str
    """The id of its prompt."""
    sample_index: int
    """Its index among the samples of the prompt, from 0."""
    seed: int
    """The seed of its draws. It follows from the seed of the run, the prompt's id (or tokens, if it
    has no id) and the number of earlier samples of the prompt."""
    text: str
    """The generated text, cut before the stop string and without special tokens."""
    tokens: tuple[int, ...]
    """All generated token ids, including those of the stop."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the model, before temperature, unless
    `SamplingParams.logprobs_mode` requests that of the sampled distribution."""
    finish_reason: FinishReason
    """"stop" (a stop string, a stop token or end of sequence), "length", "confidence" (its
    confidence fell below `SamplingParams.min_confidence`), or "error" (its structure, such as a
    grammar, allows no further token or is too much for llguidance; a warning says why)."""
    stop: str | int | None = None
    """The stop string or the stop token id that ended it; None for other reasons. A stop string
    that is a special token is given as the string, the model's own end of sequence as its id."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the most likely tokens as (token id, logprob) pairs, most likely first, if
    requested by `SamplingParams.logprobs`: `top_logprobs[3][0]` is the most likely fourth token."""
    confidences: tuple[float, ...] = ()
    """The confidence at each token, if requested; see `SamplingParams.confidence`."""
    certainties: tuple[float, ...] = ()
    """The self-certainty at each token, if requested."""
    thinking: Thinking | None = None
    """The reasoning in it, if it has some and `reasoning_tags` is set."""
    prompt_logprobs: Score | None = None
    """Log-probabilities of the prompt's tokens except the first, if requested by
    `SamplingParams.prompt_logprobs`. All samples of a prompt share one object."""
    versions: tuple[tuple[int, int], ...] = ()
    """The versions of the weights that drew its tokens, as (version, number of consecutive tokens)
    pairs; empty if all were drawn by the weights that were loaded. See `LLM.update`."""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:60]}..."
        which = f"{self.prompt_id!r:.40}, sample {self.sample_index}"
        return f"Completion({which}: {self.num_tokens:,} tokens, {self.finish_reason}, {text!r})"

    def _repr_html_(self) -> str:
        head = escape(repr(self).partition(": ")[0].removeprefix("Completion("))
        facts = f"{self.num_tokens:,} tokens, logprob {self.logprob:.2f}, {self.finish_reason}"
        return f"<p><b>{head}</b>: {facts}</p><pre>{escape(safe_text(self.text))}</pre>"

    @property
    def answer(self) -> str:
        """The text after the reasoning; empty if the reasoning never ended."""
        return answer_after(self.text, self.thinking)

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole completion under the model."""
        return sum(self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, including those of the stop."""
        return len(self.tokens)

    # The names of vLLM's CompletionOutput

    @property
    def index(self) -> int:
        """The sample index, under vLLM's name."""
        return self.sample_index

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens, under vLLM's name."""
        return self.tokens

    @property
    def cumulative_logprob(self) -> float:
        """The log-probability of the whole completion, under vLLM's name."""
        return self.logprob

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended it, under vLLM's name."""
        return self.stop


class RequestOutput(list[Completion]):
    """The completions of one prompt: a list of them that also has vLLM's names.

    Attributes:
        request_id: The index of the prompt in its call, as text.
        prompt_token_ids: The token ids of the prompt.
    """

    def __init__(
        self,
        completions: Iterable[Completion],
        *,
        request_id: str,
        prompt: str | Callable[[], str] | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        """Make the output of one prompt.

        Args:
            completions: The completions, in the order of their sample indices.
            request_id: Index of the prompt in its call.
            prompt: Text of the prompt, or a function that returns it; None for token ids.
            prompt_token_ids: Token ids of the prompt.
        """
        super().__init__(completions)
        self.request_id, self._prompt = request_id, prompt
        self.prompt_token_ids = list(prompt_token_ids)

    @property
    def prompt(self) -> str | None:
        """The prompt's text: the rendered chat for messages, and None for token ids."""
        if callable(self._prompt):
            self._prompt = self._prompt()
        return self._prompt

    @property
    def outputs(self) -> list[Completion]:
        """The completions."""
        return list(self)

    @property
    def prompt_logprobs(self) -> Score | None:
        """Log-probabilities of the prompt's tokens except the first, as in each completion."""
        return self[0].prompt_logprobs if self else None

    @property
    def finished(self) -> bool:
        """True, because a call returns after the last token of all its samples."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prompt": self.prompt}

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"outputs={list(self)!r})"
        )


@dataclass(frozen=True, slots=True)
class Status:
    """The current load."""

    rows: int
    """Number of samples being decoded."""
    pages: int
    """Number of pages in use."""
    num_pages: int
    """Number of pages of the cache."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The current state of one worker of a cluster."""

    name: str
    """Its name."""
    where: str
    """Its machine."""
    tokens: int
    """Number of tokens decoded in this run."""
    tokens_per_second: float
    """Its recent speed."""
    rows: int
    """Number of samples being decoded."""
    pages: int
    """Number of pages in use."""
    num_pages: int
    """Number of pages of its cache."""
    deaths: int
    """How often its process was lost."""

    def __str__(self) -> str:
        return (
            f"{self.name} {self.tokens_per_second:,.0f} tokens/s, {self.rows:,} rows, "
            f"{self.pages:,}/{self.num_pages:,} pages"
        )


@dataclass(frozen=True, slots=True)
class LevelRows:
    """One level of the tree that is being sampled now."""

    depth: int
    """Number of segments above it, from 0."""
    segments: int
    """Number of segments of this depth that have rows below them."""
    rows: int
    """Number of these rows."""
    kept_rows: int
    """Number of these rows whose segment of this depth is kept."""


@dataclass(slots=True)
class Usage:
    """What a run computed, and what it would have computed and read without sharing."""

    prompt_tokens_computed: int = 0
    """Prompt tokens that went through the model."""
    prompt_tokens_reused: int = 0
    """Prompt tokens whose keys and values were kept from an earlier call."""
    prompt_tokens_unshared: int = 0
    """Prompt tokens if each sample had computed its own prompt."""
    images_encoded: int = 0
    """Images that went through the model's vision tower."""
    decoded_tokens: int = 0
    """Generated tokens of finished and live samples."""
    drafted_tokens: int = 0
    """Number of draft tokens."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    recomputed_tokens: int = 0
    """Tokens that were computed again after their pages had been freed."""
    prefill_steps: int = 0
    """Number of prefill passes."""
    decode_steps: int = 0
    """Number of decode steps."""
    preemptions: int = 0
    """How often a row lost its pages to other rows."""
    peak_rows: int = 0
    """Maximum number of rows in use at a time."""
    peak_pages: int = 0
    """Maximum number of pages in use at a time."""
    num_pages: int = 0
    """Number of pages of the cache."""
    page_size: int = 0
    """Number of tokens per page."""
    key_tokens_read: int = 0
    """Keys that decode steps read in each layer."""
    key_tokens_unshared: int = 0
    """Keys that they would have read if each row read its whole context."""
    seconds: float = 0.0
    """Time in total."""
    prefill_seconds: float = 0.0
    """Time of prefill passes."""
    decode_seconds: float = 0.0
    """Time of decode steps."""
    impl: str = ""
    """The attention implementation."""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each level, the number of decode steps by kernel that read it. "level 0" is nearest the
    root. The last level is "own keys", which each row reads separately."""
    eager_because: str = ""
    """Why decode steps were not replayed as CUDA graphs; empty if they were, if graphs were turned
    off, and on a CPU."""
    uncompiled_because: str = ""
    """Why layers ran uncompiled; empty in the same cases."""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of the whole run, including prefill."""
        return self.decoded_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a row draws in a pass: 1 without accepted draft tokens."""
        passes = self.decoded_tokens - self.accepted_tokens
        return self.decoded_tokens / passes if passes > 0 else 1.0

    def count_kernels(self, names: Sequence[str]) -> None:
        """Count a decode step.

        Args:
            names: The kernel of each level, from the root to the rows' own keys.
        """
        last = len(names) - 1
        for index, name in enumerate(names):
            steps = self.kernels.setdefault(f"level {index}" if index < last else OWN_KEYS, {})
            steps[name] = steps.get(name, 0) + 1


def in_order(levels: Iterable[str]) -> list[str]:
    """Return names of levels as in `Usage.kernels`, sorted from the root to the rows' own keys."""
    return sorted(levels, key=lambda level: (level == OWN_KEYS, len(level), level))
