"""Answer types with canonical forms, which are equal strings exactly if the answers are equal."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from treegen.common.bounded.patterns import MAX_TEXT as PATTERN_TEXT
from treegen.common.bounded.patterns import Pattern
from treegen.errors import InputError
from treegen.evals.verdict import Verdict
from treegen.tasks.common.answers import numeric_answer
from treegen.tasks.common.arithmetic import canonical_number
from treegen.tasks.common.letters import LETTERS, letter_answer

# Only this many characters at the end of a text are read.
MAX_TEXT: Final = PATTERN_TEXT
# A longer answer counts as none. This bounds what is stored about a sample.
MAX_ANSWER: Final = 1000


class CanonicalAnswer(ABC):
    """An answer type that finds the canonical form of each answer by itself."""

    @abstractmethod
    def read(self, text: str) -> str | None:
        """Return the canonical form of the answer that a text gives; None if it gives none."""

    @abstractmethod
    def canonical(self, reference: str) -> str | None:
        """Return the canonical form of a right answer; None if it is not an answer of this type."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the answer that a text gives, and whether it equals one of the references."""
        answer = self.read(text)
        right = answer is not None and answer in map(self.canonical, references)
        return Verdict(answer, right)

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        """Return each answer itself."""
        return {answer: answer for answer in answers}


class TextAnswer(CanonicalAnswer):
    """The whole text as the answer. Differences in spacing, and optionally in case, are ignored."""

    def __init__(self, *, ignore_case: bool = False) -> None:
        """Set whether case counts.

        Args:
            ignore_case: Whether A and a are equal.
        """
        self._ignore_case = ignore_case

    def read(self, text: str) -> str | None:
        """Return the text with single spaces; None if it is blank."""
        return self.canonical(text)

    def canonical(self, reference: str) -> str | None:
        """Return a right answer with single spaces; None if it is blank."""
        folded = reference.casefold() if self._ignore_case else reference
        return " ".join(folded.split()) or None


class ContainedAnswer(TextAnswer):
    """A right answer anywhere in the text. If several occur, the first of the references counts."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the right answer that the text contains; the whole text if it contains none."""
        answer = self.read(text)
        for reference in map(self.canonical, references):
            if reference and answer and _stands_in(reference, answer):
                return Verdict(reference, True)
        return Verdict(answer, False)


def _stands_in(answer: str, text: str) -> bool:
    """Return whether `text` contains `answer`; the number 12 is not contained in 112 or 12.5."""
    at = text.find(answer)
    while at >= 0:
        before, after = text[max(at - 2, 0) : at], text[at + len(answer) : at + len(answer) + 2]
        if not (answer[0].isdecimal() and re.search(r"[0-9][.,]?\Z", before)) and not (
            answer[-1].isdecimal() and re.match(r"[.,]?[0-9]", after)
        ):
            return True
        at = text.find(answer, at + 1)
    return False


class PatternAnswer(TextAnswer):
    """The last match of a regular expression: its one group, or the whole match."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        """Compile the pattern.

        Args:
            pattern: The regular expression, with at most one group.
            ignore_case: Whether answers that differ only in case are equal. The pattern itself
                matches as written.

        Raises:
            InputError: The pattern is not a regular expression, is too long, or has several groups.
        """
        super().__init__(ignore_case=ignore_case)
        self._pattern = Pattern(pattern)

    def read(self, text: str) -> str | None:
        """Return the last match with single spaces."""
        match = self._pattern.last(text)
        return None if match is None else self.canonical(match)


class NumberAnswer(CanonicalAnswer):
    """The number that a text gives as its answer; 18, 18.00 and $18 are equal."""

    def read(self, text: str) -> str | None:
        """Return the result of `numeric_answer` for the end of a text."""
        return numeric_answer(text[-MAX_TEXT:])

    def canonical(self, reference: str) -> str | None:
        """Return the number of a right answer, which may follow its last "####"."""
        return canonical_number(reference.rpartition("####")[2])


class ChoiceAnswer(CanonicalAnswer):
    """The letter of the choice that a text gives as its answer."""

    def __init__(self, num_choices: int = 4) -> None:
        """Set the number of choices.

        Args:
            num_choices: Number of choices, lettered from A on.

        Raises:
            InputError: The number is not from 2 to 26.
        """
        if not 2 <= num_choices <= len(LETTERS):
            raise InputError(
                f"the number of choices must be from 2 to {len(LETTERS)}, got {num_choices}"
            )
        self._num: Final = num_choices

    def read(self, text: str) -> str | None:
        """Return the result of `letter_answer` for the end of a text."""
        return letter_answer(text[-MAX_TEXT:], self._num)

    def canonical(self, reference: str) -> str | None:
        """Return the letter of a right answer, which may have brackets around it."""
        letter = reference.strip().strip("().").upper()
        return letter if len(letter) == 1 and letter in LETTERS[: self._num] else None
