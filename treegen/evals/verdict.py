"""The result of scoring one sample, for votes and reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treegen.common.checks import check_bool, check_number
from treegen.errors import InputError, arg


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of reading one text by one filter."""

    answer: str | None
    """In canonical form, so that equal answers are equal strings; None if none was found. If the
    filter has an answer type, only a run's verdicts have this form: see
    `treegen.evals.answer_types`."""
    correct: bool
    """Whether it matches the reference; an answer that was not found never does."""
    credit: float | None = None
    """Partial credit from 0 to 1, if the task gives it. None is 1 if correct, otherwise 0."""

    def __post_init__(self) -> None:
        # Not `checked_class`, whose checks take 20 times as long, because runs have many verdicts.
        if self.answer is not None and not isinstance(self.answer, str):
            raise InputError(f"{arg('answer')} must be text or None, got {self.answer!r:.80}")
        check_bool("correct", self.correct)
        if self.credit is not None:
            check_number("credit", self.credit)
        if self.answer is None and self.correct:
            raise InputError("a verdict without an answer must not be correct")
        if self.credit is not None and not 0 <= self.credit <= 1:
            raise InputError(f"credit must be from 0 to 1, got {self.credit}")


@dataclass(frozen=True, slots=True)
class MetricVerdict(Verdict):
    """A verdict with further measures."""

    measures: Mapping[str, Any] = field(default_factory=dict)
    """The values that the task's own metrics are computed from, by their names."""
    response: Any = None
    """The judged text, if several samples are judged together."""


@dataclass(slots=True)  # a frozen class takes three times as long to create, and runs have many
class SampleScore:
    """The verdicts on one sample, by filter."""

    problem_id: str
    sample_index: int
    finish_reason: str
    verdicts: Mapping[str, Verdict]
    by_length: Mapping[str, Verdict] = field(default_factory=dict)
    """If the sample is the likeliest of several choices, the verdicts on the choice with the
    highest log-probability per character."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values that votes may weight the sample by, by name; see
    `treegen.evals.statistics.weighted`."""
    num_tokens: int = 0
    """Its generated tokens."""
    closed: bool | None = None
    """Whether its reasoning ended; None if it has none."""
