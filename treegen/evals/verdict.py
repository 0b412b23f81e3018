"""The result of scoring one sample, for votes and reports, and which answers are equal.

Answers may be equal without being equal strings, such as 1/2 and 0.5.
The answer type of a filter decides which answers are equal. Before votes are counted, each answer
of a problem is replaced by the representative of its class, so votes, tables and reports only see
classes.

The classes are the connected components of the graph in which an edge joins two answers that are
equal in either order. So they do not depend on the order of the samples, and they are defined even
where equality is not transitive, as with rounding: a chain of equal answers is one class. Correct
and wrong answers are never in one class, because each group is divided into classes separately. A
representative is the shortest answer of its class; among equally short ones, the first in string
order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from treegen.common.checks import check_bool, check_number
from treegen.errors import InputError, arg


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of reading one text by one filter."""

    answer: str | None
    """In canonical form, so that equal answers are equal strings; None if none was found. If the
    filter has an answer type, only a run's verdicts have this form: see
    `treegen.evals.verdict`."""
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
    """If the sample is the most likely of several choices, the verdicts on the choice with the
    highest log-probability per character."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values that votes may weight the sample by, by name; see
    `treegen.evals.statistics.weighted`."""
    num_tokens: int = 0
    """Its generated tokens."""
    closed: bool | None = None
    """Whether its reasoning ended; None if it has none."""


@runtime_checkable
class AnswerType(Protocol):
    """The kind of answer that a filter reads; treegen.tasks.answers has some.

    Two more members are optional: a method `ready`, which raises InputError if something that the
    type needs is not installed, and which is called before a model is loaded; and an attribute
    `compares_formulas`, True if answers are compared as mathematics.
    """

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the answer in a text, and whether it equals one of the references."""

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        """Return the representative string of each answer's class, by answer."""


def check_ready(types: Mapping[str, AnswerType]) -> None:
    """Raise InputError if something that a task's answer types need is not installed."""
    for kind in types.values():
        ready = getattr(kind, "ready", None)
        if ready is not None:
            ready()


def group_equal_answers(
    answers: Collection[str], same: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return the representative of each answer's class, by answer.

    Args:
        answers: The answers to divide into classes.
        same: Whether two answers are equal; it may depend on their order. It is called for pairs in
            an order that follows from the answers alone, and not for pairs already known to be in
            one class.
    """
    ranked = sorted(set(answers), key=lambda answer: (len(answer), answer))
    parents = {answer: answer for answer in ranked}  # a union-find forest

    def find_root(answer: str) -> str:
        while parents[answer] != answer:
            answer = parents[answer]
        return answer

    for number, second in enumerate(ranked):
        for first in ranked[:number]:
            one, other = find_root(first), find_root(second)
            if one != other and (same(first, second) or same(second, first)):
                # The representative is the first in this order.
                low, high = sorted((one, other), key=lambda answer: (len(answer), answer))
                parents[high] = low
    return {answer: find_root(answer) for answer in ranked}


def unify_answers(
    samples: Sequence[tuple[str, Mapping[str, Verdict]]], types: Mapping[str, AnswerType]
) -> list[dict[str, Verdict]]:
    """Return the verdicts on a run's samples with equal answers of a problem as equal strings.

    Args:
        samples: The problem's id and the verdicts by filter, for each sample.
        types: Answer types by filter; verdicts of other filters stay unchanged.
    """
    groups: dict[tuple[str, str, bool], set[str]] = {}
    for problem_id, verdicts in samples:
        for name, verdict in verdicts.items():
            if name in types and verdict.answer is not None:
                groups.setdefault((problem_id, name, verdict.correct), set()).add(verdict.answer)
    representatives = {
        key: types[key[1]].representatives(answers) for key, answers in groups.items()
    }

    def canonicalize(problem_id: str, name: str, verdict: Verdict) -> Verdict:
        """Return a verdict whose answer is the representative of its class.

        Args:
            problem_id: The problem's id.
            name: The filter's name.
            verdict: The verdict to change.
        """
        if verdict.answer is None or name not in types:
            return verdict
        answer = representatives[problem_id, name, verdict.correct][verdict.answer]
        return verdict if answer == verdict.answer else replace(verdict, answer=answer)

    return [
        {name: canonicalize(problem_id, name, verdict) for name, verdict in verdicts.items()}
        for problem_id, verdicts in samples
    ]
