"""Compares answers by sympy and finds programs; see treegen.report.audit.equivalence.

It imports nothing of treegen.
"""

import ast
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[^\n]*\n?", re.MULTILINE)
_MAX_LINES = 60


def prepare(kind: str) -> Callable[[list[Any]], Any]:
    """Return the function that answers requests.

    Args:
        kind: "maths" for two answers in LaTeX, "programs" for a text and names.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if kind == "maths":
        compare(r"\frac{1}{2}", r"\sqrt{2}")  # importing and the first parse are slow
        return lambda request: compare(*request)
    return lambda request: programs(*request)


def compare(first: str, second: str) -> list[bool | None]:
    """Return whether two LaTeX texts have equal values, and whether they are equal formulas."""
    try:
        one, other = _parse(first), _parse(second)
        if not (hasattr(one, "free_symbols") and hasattr(other, "free_symbols")):
            return [None, None]
        numeric = None
        if not one.free_symbols and not other.free_symbols:
            a, b = one.evalf(30), other.evalf(30)
            size = max(abs(a), abs(b))
            if size.is_finite:  # a sympy number, because a float has no 1/2004!
                distance = abs(a - b) / size if size else size
                is_rounded = "." in first + second and distance < 0.01  # 3.14 is not pi
                numeric = None if is_rounded else bool(distance < 1e-12)
        symbolic = numeric
        if numeric is None and one.free_symbols and one.free_symbols == other.free_symbols:
            symbolic = _are_equal_formulas(one, other)
        return [numeric, symbolic]
    except Exception:  # sympy raises errors of many types for texts that are not LaTeX
        return [None, None]


@lru_cache(maxsize=1 << 12)
def _parse(text: str) -> Any:
    import sympy
    from sympy.parsing.latex import parse_latex

    constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}
    return parse_latex(text).subs({sympy.Symbol(name): value for name, value in constants.items()})


def _are_equal_formulas(one: Any, other: Any) -> bool | None:
    """Return whether two formulas are equal; None if they are equal at a point, without a proof."""
    import sympy

    symbols = sorted(one.free_symbols, key=str)
    point = {symbol: sympy.Rational(7 + 4 * i, 5 + i) for i, symbol in enumerate(symbols)}
    distance = abs((one - other).subs(point).evalf(30))
    if distance.is_finite and distance > 1e-9:  # most different formulas, and simplify is slow
        return False
    return True if sympy.simplify(one - other) == 0 else None


def programs(text: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return the first and last fenced block, and the longest lines that Python can parse."""
    parts = _FENCE.split(text)
    blocks = [part for part in parts[1::2] if part.strip()]
    sources = {
        "first block": blocks[0].strip() if blocks else None,
        "last block": blocks[-1].strip() if blocks else None,
        "evalplus": None,
    }
    candidates = [part for part in parts if part.strip()]
    for part in sorted(candidates, key=len, reverse=True):
        code = _longest(part)
        if code and (not names or any(_defines(code, name) for name in names)):
            sources["evalplus"] = code
            break
    return sources


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", code, re.M) is not None
    )


def _longest(text: str) -> str | None:
    """Return the longest run of lines that is Python with a definition, an import or a loop."""
    if _parses(text):
        return text.strip()
    lines = text.splitlines()[:_MAX_LINES]
    for size in range(len(lines), 0, -1):
        for start in range(len(lines) - size + 1):
            part = "\n".join(lines[start : start + size])
            if lines[start].strip() and _parses(part):
                return part.strip()
    return None


def _parses(text: str) -> bool:
    if not re.search(r"^\s*(?:def|class|import|from|for|while|print)\b", text, re.MULTILINE):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
