"""Answers that need not be exact: ChartQA's relaxed accuracy, DocVQA's ANLS."""

from collections.abc import Sequence
from typing import Final

_TOLERANCE: Final = 0.05
_WORST: Final = 0.5


def is_relaxed_match(text: str, answer: str) -> bool:
    """Return whether a number is within 5% of the right one; any other text must be equal.

    Case is ignored. This is relaxed_correctness of https://github.com/google-research/pix2struct
    (metrics.py), from section 5.1 of https://arxiv.org/abs/2203.10244.
    """
    found, right = number_of(text), number_of(answer)
    if found is not None and right:
        return abs(found - right) / abs(right) <= _TOLERANCE
    return text.lower() == answer.lower()


def number_of(text: str) -> float | None:
    """Return a text as a number, a percentage as hundredths; None if it is not a number."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(text: str, answers: Sequence[str]) -> float:
    """Return the normalised similarity of a text and the closest of some answers.

    The similarity is 1 minus the edits per character, and 0 if that is below 0.5. Case and spacing
    are ignored. This is anls of lmms-eval (api/metrics.py), from https://arxiv.org/abs/1907.00490.
    """
    best = 0.0
    found = " ".join(text.lower().split())
    for answer in answers:
        right = " ".join(answer.lower().split())
        length = max(len(answer.upper()), len(text.upper()))
        # The difference of the lengths bounds the edits, so distant texts need no count.
        if length and 1 - abs(len(right) - len(found)) / length < _WORST:
            continue
        best = max(best, 1 - _edits(right, found) / length if length else 1.0)
    return best if best >= _WORST else 0.0


def _edits(a: str, b: str) -> int:
    """Return the Levenshtein distance of two texts."""
    if len(a) > len(b):
        a, b = b, a
    row = list(range(len(a) + 1))
    for i, letter in enumerate(b, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(a, start=1):
            same = before
            before = row[j]
            row[j] = same if letter == other else 1 + min(same, before, row[j - 1])
    return row[-1]
