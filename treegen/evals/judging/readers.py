"""Readers of verdicts in texts of judges; a text without a verdict is unreadable, never a 0."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

Reader = Callable[[str, Sequence[str]], str | None]
"""Maps a text and the choices of a rubric to a verdict; None if the text has no verdict."""

_LAST: Final = re.compile(
    r"[*_`\s]*verdict[*_`]*\s*:[*_`\s]*(.*?)[*_`\s]*\.?[*_`\s]*", re.IGNORECASE
)
_RATING: Final = re.compile(r"\[\[(\d+\.?\d*)\]\]")
_RATING_BACKUP: Final = re.compile(r"\[(\d+\.?\d*)\]")


def last_line(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict from a last line "Verdict: X", where X is a choice in any case.

    If lines of this form name different choices, the text has no verdict.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    spelling = {choice.casefold(): choice for choice in choices}
    said = [spelling.get(match[1].casefold()) for line in lines if (match := _LAST.fullmatch(line))]
    if not lines or not said or _LAST.fullmatch(lines[-1]) is None:
        return None
    return said[-1] if len(set(said)) == 1 else None


def simpleqa(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict like SimpleQA of simple-evals: the first A, B or C anywhere, C by default.

    So "INCORRECT" is a C, because it contains the letter. Source: openai/simple-evals,
    simpleqa_eval.py.
    """
    match = re.search("[ABC]", text)
    return match[0] if match else "C"


def mt_bench(text: str, choices: Sequence[str]) -> str | None:
    """Read the rating like MT-Bench's single-answer grading: first [[rating]], or else [rating].

    Source: lm-sys/FastChat, llm_judge/common.py. There a text without a rating has the score -1,
    and show_result.py leaves it out.
    """
    match = _RATING.search(text) or _RATING_BACKUP.search(text)
    return match[1] if match else None


def mt_bench_pair(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict like MT-Bench's pairwise grading: [[A]], or else [[B]], or else [[C]] (tie).

    Source: lm-sys/FastChat, llm_judge/common.py, where a text without a verdict is an "error".
    """
    return next((letter for letter in "ABC" if f"[[{letter}]]" in text), None)


READERS: Final[Mapping[str, Reader]] = {
    "last-line": last_line,
    "simpleqa": simpleqa,
    "mt-bench": mt_bench,
    "mt-bench-pair": mt_bench_pair,
}
