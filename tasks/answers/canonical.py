"""Answers whose canonical forms are equal strings exactly where the answers are equal."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from treegen.common.bounded.patterns import Pattern
from treegen.errors import InputError
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.limits import MAX_TEXT
from treegen.tasks.common.answers import canonical_number, numeric_answer
from treegen.tasks.common.letters import LETTERS, letter_answer


class CanonicalAnswer(ABC):
    """An answer type that has a canonical form for each answer by itself."""

    @abstractmethod
    def read(self, text: str) -> str | None:
        """Return the canonical form of what a text gives as its answer; None if it gives none."""

    @abstractmethod
    def canonical(self, reference: str) -> str | None:
        """Return the canonical form of a right answer; None if it is not one of this type."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return what a text gives as its answer, and whether it equals one of the references."""
        answer = self.read(text)
        right = answer is not None and answer in map(self.canonical, references)
        return Verdict(answer, right)

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        """Return each answer itself."""
        return {answer: answer for answer in answers}


class TextAnswer(CanonicalAnswer):
    """The whole text. Spacing does not count, and case only if it is not ignored."""

    def __init__(self, *, ignore_case: bool = False) -> None:
        """ignore_case: whether A and a are the same."""
        self._ignore_case = ignore_case

    def read(self, text: str) -> str | None:
        """Return the text with single spaces; None if it is blank."""
        return self.canonical(text)

    def canonical(self, reference: str) -> str | None:
        """Return a right answer with single spaces; None if it is blank."""
        folded = reference.casefold() if self._ignore_case else reference
        return " ".join(folded.split()) or None


class ContainedAnswer(TextAnswer):
    """A text that contains the right answer; of several the first of the references counts."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the right answer that the text contains; the whole text if it has none."""
        answer = self.read(text)
        wanted = [self.canonical(each) for each in references]
        found = next(
            (each for each in wanted if each and answer and _stands_in(each, answer)), None
        )
        return Verdict(found or answer, found is not None)


def _stands_in(wanted: str, text: str) -> bool:
    """Return whether a text stands in another one; the number 12 does not stand in 112 or 12.5."""
    at = text.find(wanted)
    while at >= 0:
        before, after = text[max(at - 2, 0) : at], text[at + len(wanted) : at + len(wanted) + 2]
        if not (wanted[0].isdecimal() and re.search(r"[0-9][.,]?\Z", before)) and not (
            wanted[-1].isdecimal() and re.match(r"[.,]?[0-9]", after)
        ):
            return True
        at = text.find(wanted, at + 1)
    return False


class PatternAnswer(TextAnswer):
    """What a regular expression finds last: its one group, or all of the match."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        """ignore_case: of answers, not of the pattern.

        Raises:
            InputError: it is no regular expression, is too long, or has several groups.
        """
        super().__init__(ignore_case=ignore_case)
        self._pattern = Pattern(pattern)

    def read(self, text: str) -> str | None:
        """Return the last match with single spaces."""
        found = self._pattern.last(text)
        return None if found is None else self.canonical(found)


class NumberAnswer(CanonicalAnswer):
    """The number that a text gives as its answer; 18, 18.00 and $18 are equal."""

    def read(self, text: str) -> str | None:
        """Return what `numeric_answer` reads of the end of a text."""
        return numeric_answer(text[-MAX_TEXT:])

    def canonical(self, reference: str) -> str | None:
        """Return the number that a right answer is, or that stands after its last "####"."""
        return canonical_number(reference.rpartition("####")[2])


class ChoiceAnswer(CanonicalAnswer):
    """The letter of a choice that a text settles on."""

    def __init__(self, num_choices: int = 4) -> None:
        """num_choices: from A on; raise InputError if that is not from 2 to 26."""
        if not 2 <= num_choices <= len(LETTERS):
            raise InputError(
                f"there are 2 to {len(LETTERS)} choices, not {num_choices}; "
                "give how many letters there are"
            )
        self._num: Final = num_choices

    def read(self, text: str) -> str | None:
        """Return what `letter_answer` reads of the end of a text."""
        return letter_answer(text[-MAX_TEXT:], self._num)

    def canonical(self, reference: str) -> str | None:
        """Return the letter that a right answer is, with or without brackets."""
        letter = reference.strip().strip("().").upper()
        return letter if len(letter) == 1 and letter in LETTERS[: self._num] else None
