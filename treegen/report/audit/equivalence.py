r"""Compares mathematical answers without math-verify, and finds programs as evalplus does.

Texts of a model are untrusted: sympy and Python's parser read them in a process with a limit of CPU
time and memory.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from treegen.common.bounded.worker import FileWorker
from treegen.report.audit.readers import Rule, last_boxed, value_of

SECONDS: Final = 1.0
_MEMORY: Final = 2 << 30
_MAX_ANSWER: Final = 400
_FILE: Final = Path(__file__).with_name("equivalence_worker.py")


def _worker(kind: str, what: str) -> FileWorker:
    return FileWorker(_FILE, kind, seconds=SECONDS, memory=_MEMORY, what=what, site=True)


_MATHS: Final = _worker("maths", "that compares answers for an audit")
_PROGRAMS: Final = _worker("programs", "that finds programs for an audit")
_REMOVED: Final = re.compile(
    r"\\left|\\right|\\[,;!: ]|\\displaystyle|\$|\^\{?\\circ\}?|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}"
)
# sympy's parser skips what it does not know, such as the base in 202_7.
_READABLE: Final = re.compile(
    r"(?:\\(?:frac|sqrt|pi|cdot|times|div|ln|sin|cos|tan)(?![a-zA-Z])|[0-9a-zA-Z+\-*/^{}().!\[\]])+"
)
_EXPRESSION: Final = re.compile(r"answer\s{1,4}is:?\s{0,4}(.{1,200}?)(?:\.\s|\.?$)", re.MULTILINE)


def plain_form(answer: str) -> str:
    """Return an answer without spaces, sizes, units and dollar signs, as MATH's authors do."""
    text = _REMOVED.sub("", answer.replace("dfrac", "frac").replace("tfrac", "frac"))
    text = re.sub(r"\s+", "", text).removesuffix(".").replace("\\%", "%")
    head, equals, tail = text.rpartition("=")
    return tail if equals and len(head) <= 3 else text


def expression_of(text: str) -> str | None:
    r"""Return the last boxed answer, else the last text after "the answer is"."""
    box = last_boxed(text)
    if box is not None:
        return box
    found = _EXPRESSION.findall(text)
    return found[-1].strip() if found else None


@lru_cache(maxsize=1 << 16)
def compare(first: str, second: str) -> tuple[bool | None, bool | None]:
    """Return whether two answers are equal as numbers, and as formulas.

    None means that they are not both numbers, or that it is not decided within the limits.
    """
    one, other = plain_form(first), plain_form(second)
    if one == other:
        return True, True
    if "%" in one + other:  # 50% is 50 to some and 0.5 to others
        return None, None
    values = value_of(one), value_of(other)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1], values[0] == values[1]
    if not all(
        text and len(text) <= _MAX_ANSWER and _READABLE.fullmatch(text) for text in (one, other)
    ):
        return None, None
    reply = _MATHS.ask([one, other])
    return (None, None) if reply is None else (reply[0], reply[1])


def find_programs(text: str, names: Sequence[str]) -> dict[str, str | None] | None:
    """Return the programs in a text by rule: the first and last block, and evalplus' sanitizer.

    Args:
        text: The sample.
        names: Functions or classes that the program must define; may be empty.

    Returns:
        The program by the name of the rule; None if finding them takes too long.
    """
    programs: dict[str, str | None] | None = _PROGRAMS.ask([text[-20_000:], [*names]])
    return programs


MATH_RULES: Final = (
    Rule("boxed text", "MATH", last_boxed, lambda a, b: plain_form(a) == plain_form(b), True),
    Rule("sympy, values", "Minerva", expression_of, lambda a, b: compare(a, b)[0] is True, True),
    Rule("sympy, formulas", "Minerva", expression_of, lambda a, b: compare(a, b)[1] is True, True),
)
