"""Answers that are equal without being equal strings, such as 1/2 and 0.5.

A task says of a filter what kind of answers it reads: its answer type. Then a run's verdicts are
put in order before anything counts votes. Equal answers of a problem get one string, their class's
representative. So every vote, table and report sees classes, and none of them knows of it.

The classes of some answers are the connected parts of the graph in which an edge joins two answers
that are equal in either order. So they do not depend on the order of the samples. They are defined
even where equality is not transitive, as with rounding: then a chain of equal answers is one class.
Right and wrong answers are never in one class: classes are made of the right ones and of the wrong
ones apart. A representative is the shortest of its class, of equally short ones the first in the
order of strings.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from treegen.evals.verdict import Verdict


@runtime_checkable
class AnswerType(Protocol):
    """What kind of answer a filter reads; treegen.tasks.answers has some.

    One more member is optional: a method `ready`, which raises InputError if what the type needs is
    not installed. It is called before a model is loaded.
    """

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return what a text gives as its answer, and whether it equals one of the references."""
        ...

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        """Return for each of some answers the one string that stands for its class."""
        ...


def answer_types(task: object) -> Mapping[str, AnswerType]:
    """Return the answer types that a task declares, by filter; it need not have any."""
    found: Mapping[str, AnswerType] = getattr(task, "answer_types", {})
    return found


def check_ready(task: object) -> None:
    """Raise InputError if an answer type of a task lacks what it needs."""
    for kind in answer_types(task).values():
        ready = getattr(kind, "ready", None)
        if ready is not None:
            ready()


def group_equal_answers(
    answers: Collection[str], same: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return for each answer the representative of its class.

    Args:
        same: Whether two answers are equal; it may depend on their order. It is asked about pairs
            in an order that follows from the answers alone, and not about pairs whose class is
            known to be one.
    """
    ranked = sorted(set(answers), key=lambda answer: (len(answer), answer))
    above = {answer: answer for answer in ranked}

    def top(answer: str) -> str:
        while above[answer] != answer:
            answer = above[answer]
        return answer

    for number, second in enumerate(ranked):
        for first in ranked[:number]:
            one, other = top(first), top(second)
            if one != other and (same(first, second) or same(second, first)):
                # The representative is the first in this order.
                low, high = sorted((one, other), key=lambda answer: (len(answer), answer))
                above[high] = low
    return {answer: top(answer) for answer in ranked}


def unify_answers(
    found: Sequence[tuple[str, Mapping[str, Verdict]]], types: Mapping[str, AnswerType]
) -> list[dict[str, Verdict]]:
    """Return verdicts on a run's samples, equal answers of a problem as equal strings.

    Args:
        found: For each sample its problem's id and its verdicts by filter.
        types: Answer types by filter; verdicts of other filters stay as they are.
    """
    groups: dict[tuple[str, str, bool], set[str]] = {}
    for problem_id, verdicts in found:
        for name, verdict in verdicts.items():
            if name in types and verdict.answer is not None:
                groups.setdefault((problem_id, name, verdict.correct), set()).add(verdict.answer)
    known = {key: types[key[1]].representatives(answers) for key, answers in groups.items()}

    def canonicalize(problem_id: str, name: str, verdict: Verdict) -> Verdict:
        if verdict.answer is None or name not in types:
            return verdict
        answer = known[problem_id, name, verdict.correct][verdict.answer]
        return verdict if answer == verdict.answer else replace(verdict, answer=answer)

    return [
        {name: canonicalize(problem_id, name, verdict) for name, verdict in verdicts.items()}
        for problem_id, verdicts in found
    ]
