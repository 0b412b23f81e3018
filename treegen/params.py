"""How to sample: the parameters of one request, checked when they are made. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treegen.errors import InputError

MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in vLLM.

    The order of operations is temperature, min_p, top_k, top_p (each on what the one before it
    left, renormalised), then one draw.

    temperature: 0 is greedy decoding; then all samples of a prompt are one decode.
    top_p: keep the fewest most likely tokens whose probability reaches this, in (0, 1].
    top_k: keep this many most likely tokens; 0 keeps all.
    min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
    max_tokens: generated tokens at most, the stop token included.
    stop: strings that end a sample; cut from its text, and may span tokens.
    stop_token_ids: token ids that end a sample, beside the model's own end-of-sequence ids.
    ignore_eos: go on after the model's end-of-sequence ids.
    seed: with the prompt's id and the sample's index, decides every draw.
    logprobs: how many likeliest alternatives to report per token.
    n: samples per prompt, for flat prompts (`LLM.generate`); trees say it per node.
    include_stop: leave the stop string in the text.

    Raises InputError for a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int = 0
    n: int = 1
    include_stop: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        for name in ("top_k", "max_tokens", "seed", "logprobs", "n"):
            _check_int(name, getattr(self, name))
        if self.temperature < 0:
            raise InputError(f"temperature must be at least 0, got {self.temperature}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InputError(
                f"temperature {self.temperature} is too small to divide by; use 0 for greedy "
                f"decoding, or at least {MIN_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise InputError(f"top_k must be at least 0 (0 keeps all), got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed must be in [0, 2**63), got {self.seed}")
        if self.logprobs < 0:
            raise InputError(f"logprobs must be at least 0, got {self.logprobs}")
        if self.n < 1:
            raise InputError(f"n must be at least 1, got {self.n}")
        if any(not isinstance(text, str) or not text for text in self.stops):
            raise InputError(f"stop strings must be non-empty text, got {self.stop!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token)
            if token < 0:
                raise InputError(f"stop_token_ids must not be negative, got {token}")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value!r}")


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {value!r}")
