r"""Compares mathematical answers without math-verify, and finds programs like evalplus.

Texts of a model are untrusted: sympy and Python's parser read them in a process with a limit of CPU
time and memory. All requests of an audit together have a limit of time too.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from treegen.common.bounded.worker import FileWorker, count_cpu_seconds
from treegen.report.audit.readers import ScoringRule, is_same_number, last_boxed, value_of

SECONDS: Final = 1.0
MAX_SECONDS: Final = 300.0
"""CPU time that all slow comparisons of one audit may take."""
_MEMORY: Final = 2 << 30
_MAX_ANSWER: Final = 400
_FILE: Final = Path(__file__).with_name("equivalence_worker.py")


def _make_worker(kind: str, what: str) -> FileWorker:
    return FileWorker(_FILE, kind, seconds=SECONDS, memory=_MEMORY, what=what, site=True)


_MATHS: Final = _make_worker("maths", "that compares answers for an audit")
_PROGRAMS: Final = _make_worker("programs", "that finds programs for an audit")
_REMOVED: Final = re.compile(r"\\left|\\right|\\[,;!: ]|\\displaystyle|\\?\$|\^\{?\\circ\}?")
_UNIT: Final = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\.?\s*$")
# A mixed number, or two numbers.
_AMBIGUOUS: Final = re.compile(r"\d\\frac|\d\s+\.?\d")
# sympy's parser skips what it does not know, such as the base in 202_7.
_READABLE: Final = re.compile(
    r"(?:\\(?:frac|sqrt|pi|cdot|times|div|ln|sin|cos|tan)(?![a-zA-Z])|[0-9a-zA-Z+\-*/^{}().!\[\]])+"
)
_EXPRESSION: Final = re.compile(r"answer\s{1,4}is:?\s{0,4}(.{1,200}?)(?:\.\s|\.?$)", re.MULTILINE)


class _OutOfTimeError(Exception):
    """The time of the audit is used up."""


@dataclass(slots=True)
class TimeLimit:
    """How much time the slow comparisons of an audit may still take."""

    seconds: float
    num_left_out: int = 0
    """Comparisons that were not done, because no time was left."""

    @property
    def notices(self) -> tuple[str, ...]:
        """A line about what was left out; empty if nothing was."""
        if not self.num_left_out:
            return ()
        return (
            f"{self.num_left_out:,} comparisons of formulas or programs were skipped, because "
            f"earlier comparisons took {MAX_SECONDS:.0f} seconds of CPU time; the findings on "
            "answers may be incomplete",
        )

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, and count its time.

        Raises:
            _OutOfTimeError: no time is left.
        """
        if self.seconds <= 0:
            self.num_left_out += 1
            raise _OutOfTimeError
        start = count_cpu_seconds()
        try:
            return function()
        finally:
            self.seconds -= count_cpu_seconds() - start


_LIMIT: ContextVar[TimeLimit] = ContextVar("_LIMIT")


@contextmanager
def limit_time(seconds: float = MAX_SECONDS) -> Iterator[TimeLimit]:
    """Limit the time of all slow comparisons within the context together."""
    token = _LIMIT.set(limit := TimeLimit(seconds))
    try:
        yield limit
    finally:
        _LIMIT.reset(token)


def _run_within_limit(function: Callable[[], Any]) -> Any:
    limit = _LIMIT.get(None)
    return function() if limit is None else limit.run(function)


def run_limited(function: Callable[[], Any]) -> Any:
    """Return what a slow comparison returns; None if the time of the audit is used up."""
    try:
        return _run_within_limit(function)
    except _OutOfTimeError:
        return None


def plain_form(answer: str) -> str:
    """Return an answer without sizes, dollar signs, its unit and spaces that mean nothing."""
    text = _REMOVED.sub("", answer.replace("dfrac", "frac").replace("tfrac", "frac"))
    text = _UNIT.sub("", text).strip()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).removesuffix(".").replace("\\%", "%")


def _normalize_pair(first: str, second: str) -> tuple[str, str] | None:
    """Return the plain forms of two answers; None if their units differ.

    Of x=5 and 5, both are 5; x=5 and y=5 stay as they are.
    """
    units = [_UNIT.search(_REMOVED.sub("", answer)) for answer in (first, second)]
    names = {unit[1].strip() for unit in units if unit}
    if len(names) > 1:
        return None
    one, other = plain_form(first), plain_form(second)
    heads = [re.match(r"[^=]{1,3}=(?=[^=]+$)", text) for text in (one, other)]
    if heads[0] and not heads[1]:
        one = one[heads[0].end() :]
    if heads[1] and not heads[0]:
        other = other[heads[1].end() :]
    return one, other


def _equals_as_text(answer: str, gold: str) -> bool:
    pair = _normalize_pair(answer, gold)
    return pair is not None and pair[0] == pair[1]


def expression_of(text: str) -> str | None:
    r"""Return the last boxed answer, else the last text after "the answer is"."""
    box = last_boxed(text)
    if box is not None:
        return box
    matches = _EXPRESSION.findall(text)
    return matches[-1].strip() if matches else None


def compare(first: str, second: str) -> tuple[bool | None, bool | None]:
    """Return whether two answers are equal as numbers, and as formulas.

    None means that they are not both numbers, or that it is not decided within the limits.
    """
    pair = _normalize_pair(first, second)
    if pair is None or max(map(len, pair)) > _MAX_ANSWER:
        return None, None
    one, other = pair
    if one == other:
        return True, True
    if "%" in one + other or _AMBIGUOUS.search(one) or _AMBIGUOUS.search(other):
        return None, None  # 50% is 50 to some and 0.5 to others
    if value_of(one) is not None and value_of(other) is not None:
        same = is_same_number(one, other)
        return same, same
    if not (_READABLE.fullmatch(one) and _READABLE.fullmatch(other)):
        return None, None
    try:
        return _compare_formulas(one, other)
    except _OutOfTimeError:  # an error, so that it is not kept for other audits
        return None, None


@lru_cache(maxsize=1 << 16)
def _compare_formulas(first: str, second: str) -> tuple[bool | None, bool | None]:
    reply = _run_within_limit(lambda: _MATHS.ask([first, second]))
    return (None, None) if reply is None else (reply[0], reply[1])


def find_programs(text: str, names: Sequence[str]) -> dict[str, str | None] | None:
    """Return the programs in a text: the first block, the last one, and one as evalplus might.

    Args:
        text: The sample.
        names: Functions or classes that the program must define; may be empty.

    Returns:
        The program by the name of the rule; None if finding them takes too long.
    """
    request = [text[-20_000:], [*names]]
    programs: dict[str, str | None] | None = run_limited(lambda: _PROGRAMS.ask(request))
    return programs


MATH_RULES: Final = (
    ScoringRule("boxed text", "like MATH", last_boxed, _equals_as_text, True),
    ScoringRule("values", "sympy", expression_of, lambda a, b: compare(a, b)[0] is True, True),
    ScoringRule("formulas", "sympy", expression_of, lambda a, b: compare(a, b)[1] is True, True),
)
