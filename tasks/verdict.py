"""What scoring says about one sample: the common currency of tasks, votes and reports."""

from collections.abc import Mapping
from dataclasses import dataclass

from treegen.errors import InputError


@dataclass(frozen=True, slots=True)
class Verdict:
    """One filter's reading of one text.

    answer: in canonical form, so that equal answers are equal strings; None if none was found.
    correct: whether it matches the reference; an answer that was not found never does.
    """

    answer: str | None
    correct: bool

    def __post_init__(self) -> None:
        if self.answer is None and self.correct:
            raise InputError("a verdict without an answer cannot be correct")


@dataclass(frozen=True, slots=True)
class SampleScore:
    """The verdicts on one sample, by filter."""

    problem_id: str
    sample_index: int
    finish_reason: str
    verdicts: Mapping[str, Verdict]
