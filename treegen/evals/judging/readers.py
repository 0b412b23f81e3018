"""Verdicts read out of the texts that judges write. A text without one is unreadable, never a 0."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

Reader = Callable[[str, Sequence[str]], str | None]
"""From a text and the choices of a rubric to one of them; None if the text has no verdict."""

_LAST: Final = re.compile(
    r"[*_`\s]*verdict[*_`]*\s*:[*_`\s]*(.*?)[*_`\s]*\.?[*_`\s]*", re.IGNORECASE
)
_RATING: Final = re.compile(r"\[\[(\d+\.?\d*)\]\]")
_RATING_BACKUP: Final = re.compile(r"\[(\d+\.?\d*)\]")


def last_line(text: str, choices: Sequence[str]) -> str | None:
    """Read a last line "Verdict: X". X must be a choice, in whatever case; other lines may differ.

    A text whose lines of that form name two choices has no verdict.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    known = {choice.casefold(): choice for choice in choices}
    said = [known.get(found[1].casefold()) for line in lines if (found := _LAST.fullmatch(line))]
    if not lines or not said or _LAST.fullmatch(lines[-1]) is None:
        return None
    return said[-1] if len(set(said)) == 1 else None


def simpleqa(text: str, choices: Sequence[str]) -> str | None:
    """Read as simple-evals' SimpleQA does: the first A, B or C anywhere, and C if there is none.

    So "INCORRECT" is a C, as it has the letter. Source: openai/simple-evals, simpleqa_eval.py.
    """
    found = re.search("[ABC]", text)
    return found[0] if found else "C"


def mt_bench(text: str, choices: Sequence[str]) -> str | None:
    """Read as MT-Bench's single-answer grading does: the first [[rating]], or else [rating].

    Source: lm-sys/FastChat, llm_judge/common.py. There a text without one has the score -1, and
    show_result.py leaves it out.
    """
    found = _RATING.search(text) or _RATING_BACKUP.search(text)
    return found[1] if found else None


def mt_bench_pair(text: str, choices: Sequence[str]) -> str | None:
    """Read as MT-Bench's pairwise grading does: [[A]] before [[B]] before [[C]], a tie.

    Source: lm-sys/FastChat, llm_judge/common.py, where a text without one is an "error".
    """
    return next((letter for letter in "ABC" if f"[[{letter}]]" in text), None)


READERS: Final[Mapping[str, Reader]] = {
    "last-line": last_line,
    "simpleqa": simpleqa,
    "mt-bench": mt_bench,
    "mt-bench-pair": mt_bench_pair,
}
