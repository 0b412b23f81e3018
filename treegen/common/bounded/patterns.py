"""Regular expressions of users and of files, matched in bounded time.

Python's matcher can take exponential time, and checking a pattern cannot rule that out. So a
separate process does the matching; see treegen.common.bounded.worker.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from treegen.common.bounded.worker import FileWorker
from treegen.errors import InputError

MAX_TEXT: Final = 200_000
"""Number of last characters of a text that are searched."""
MAX_PATTERN: Final = 1000
SECONDS: Final = 1.0
MATCH_SECONDS: Final = 10.0
"""CPU time for matching all patterns of a file with all names."""
_MEMORY: Final = 1 << 30
_FILE: Final = Path(__file__).with_name("pattern_worker.py")


def _worker(setup: list[str], what: str, seconds: float = SECONDS) -> FileWorker:
    """Return a process that matches patterns; see `pattern_worker.prepare` for its setup."""
    return FileWorker(_FILE, setup, seconds=seconds, memory=_MEMORY, what=what, site=False)


_COUNTS: Final = _worker(["count"], "that matches patterns")


class Pattern:
    """A compiled pattern; its process starts with the first text and ends with this object."""

    def __init__(self, text: str) -> None:
        """Compile the pattern here, to check it.

        Raises:
            InputError: It is not a regular expression, is too long, or has several groups.
        """
        if len(text) > MAX_PATTERN:
            raise InputError(
                f"the pattern has {len(text):,} characters, but the maximum is {MAX_PATTERN:,}; "
                "shorten the pattern"
            )
        try:
            groups = re.compile(text).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(
                f"{text!r} is not a regular expression: {error}; correct the expression, or "
                "escape special characters with a backslash"
            ) from None
        if groups > 1:
            raise InputError(
                f"the pattern {text!r} has {groups} groups, but only one group, for the answer, "
                "is allowed; write (?:...) for the other groups"
            )
        self._worker = _worker(["last", text], f"that matches {text!r}")

    def last(self, text: str) -> str | None:
        """Return the answer that the last match in a text gives; None if nothing matches.

        Also returns None if matching takes longer than SECONDS. Only the last MAX_TEXT characters
        of a text are searched.

        Raises:
            TreegenError: The process that matches ended.
        """
        answer: str | None = self._worker.ask(text[-MAX_TEXT:])
        return answer


class CountedPattern:
    """A regular expression from a data set, whose matches in texts are counted."""

    def __init__(self, word: str, around: str = "{}", *, ignore_case: bool = False) -> None:
        """Compile the pattern here, to check it.

        Args:
            word: The pattern, as in the data.
            around: A pattern in which {} is replaced by `word`.
            ignore_case: Whether to ignore case.

        Raises:
            ValueError: It is not a regular expression.
        """
        source, flags = around.replace("{}", word), re.IGNORECASE if ignore_case else 0
        try:
            self._pattern = re.compile(source, flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{word[:40]!r} is not a valid pattern: {error}") from None
        # Most patterns are plain words, which match in time linear in the text.
        self._is_plain = not set(word) & set("*+?{}()[]|\\.^$")

    def count(self, text: str) -> int | None:
        """Return how often it is found in a text; None if that takes more than `SECONDS`.

        Raises:
            TreegenError: The process that matches ended.
        """
        if self._is_plain:
            return sum(1 for _ in self._pattern.finditer(text))
        num_matches: int | None = _COUNTS.ask([self._pattern.pattern, self._pattern.flags, text])
        return num_matches


def first_matches(patterns: Sequence[str], texts: Sequence[str], name: str) -> list[int | None]:
    """Return for each text the index of the first pattern that matches at its start.

    Args:
        patterns: Regular expressions, as in a file.
        texts: Texts to match.
        name: What messages call the patterns.

    Returns:
        The indices; None where no pattern matches.

    Raises:
        InputError: A pattern is not a regular expression, or matching takes more than
            `MATCH_SECONDS` of CPU time.
        TreegenError: The process that matches ended.
    """
    if not patterns:
        return [None] * len(texts)
    worker = _worker(["first"], f"that matches {name}", MATCH_SECONDS)
    reply = worker.ask([list(patterns), list(texts)])
    if reply is None:
        raise InputError(
            f"{name}: the regular expressions take more than {MATCH_SECONDS:g} s or too much "
            "memory; remove nested repetitions from the expressions"
        )
    if "rejected" in reply:
        raise InputError(
            f"{name}: {reply['rejected']}; write a valid regular expression, or escape special "
            "characters with a backslash"
        )
    indices: list[int | None] = reply["indices"]
    return indices
