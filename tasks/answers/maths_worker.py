r"""Calls math-verify in a process of its own; see treegen.tasks.answers.maths.

It imports nothing of treegen. An answer is a short text that identifies what math-verify parsed:
the first text that was parsed, or sympy's LaTeX, such that parsing `$answer$` gives the same again.
A percent sign outside of the mathematics is put at the end.
"""

import cmath
import logging
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# These forms are parsed once before the first request, because the parser is slow at first.
_WARM = (
    r"$\frac{1}{2}$",
    r"$\left(-\infty, 3\right] \cup \{1, 2\}$",
    r"$x^2+2x-1=0$",
    r"$-1.5\%$",
    r"$\sqrt[3]{2}\pi$",
    r"$\begin{pmatrix}1\\2\end{pmatrix}$",
    r"$x_1 \le \sin(y)$",
    "1/2",
    "3",
    r"$10^{\circ}$",
    r"$\text{(A)}$",
    r"$3!+\log_2 8$",
)


def prepare(max_answer: int) -> Callable[[list[Any]], Any]:
    """Return a function that answers ["judge", text, references] and ["same", a, b].

    Args:
        max_answer: Maximum characters of an answer.
    """
    logging.disable(logging.CRITICAL)
    library = _MathVerify(max_answer)
    for text in _WARM:
        library.equal(library.parse(text), library.parse(text))
    calls: dict[str, Callable[..., Any]] = {"judge": library.judge, "same": library.same}
    return lambda request: calls[request[0]](*request[1:])


class _MathVerify:
    """Parses, names and compares answers."""

    def __init__(self, max_answer: int) -> None:
        import math_verify
        import sympy

        self._math_verify, self._sympy = math_verify, sympy
        self._max_answer = max_answer
        self._parse_reference = lru_cache(maxsize=256)(lambda text: self.parse(f"${text}$"))
        self._parse_answer = lru_cache(maxsize=256)(self._parse_uncached)

    def parse(self, text: str) -> list[Any]:
        # math-verify's own time limit uses a signal; this process has a limit already.
        expression: list[Any] = self._math_verify.parse(text, parsing_timeout=None)
        return expression

    def equal(self, gold: list[Any], answer: list[Any]) -> bool:
        return bool(self._math_verify.verify(gold, answer, timeout_seconds=None))

    def judge(self, text: str, references: list[str]) -> list[Any]:
        parsed = self.parse(text)
        answer = self._name(parsed) if parsed else None
        if answer is None:
            return [None, False]
        golds = map(self._parse_reference, references)
        return [answer, any(self.equal(gold, parsed) for gold in golds)]

    def same(self, first: str, second: str) -> bool:
        one, other = self._parse_answer(first), self._parse_answer(second)
        if _differ_numerically(one, other, self._sympy):
            return False
        return self.equal(one, other) or self.equal(other, one)

    def _parse_uncached(self, answer: str) -> list[Any]:
        if answer.endswith("%") and not answer.endswith("\\%"):
            return self.parse(f"${answer[:-1]}$%")
        return self.parse(f"${answer}$")

    def _names(self, parsed: list[Any]) -> list[str]:
        """Return texts that may identify the parsed expression, the best first."""
        texts = [text for text in parsed if isinstance(text, str)]
        if isinstance(parsed[0], str):
            return texts
        percents = [f"{text}%" for text in texts]
        return [*texts, *percents, self._sympy.latex(parsed[0])]

    def _name(self, parsed: list[Any]) -> str | None:
        texts = [" ".join(text.split()) for text in self._names(parsed)]
        texts = [text for text in texts if 0 < len(text) <= self._max_answer]
        readable = [text for text in texts if "$" not in text]
        for alike in (_identical, self.equal):
            for text in readable:
                if alike(parsed, self._parse_answer(text)):
                    return text
        return next(iter(readable or texts), None)


def _identical(first: list[Any], second: list[Any]) -> bool:
    return bool(second) and type(second[0]) is type(first[0]) and second[0] == first[0]


def _differ_numerically(one: list[Any], other: list[Any], sympy: Any) -> bool:
    """Return whether the values of two answers are so far apart that they cannot be equal.

    Returns False in doubt. This check avoids slow algebraic proofs of inequality. Expressions are
    compared at one point. For two equations with the same left side, such as y=x+1, the right sides
    are compared.
    """
    if set(one[1:]) & set(other[1:]) or not one or not other:
        return False
    first, second = one[0], other[0]
    if isinstance(first, sympy.Eq) and isinstance(second, sympy.Eq):
        name = first.lhs
        if not isinstance(name, sympy.Symbol) or name != second.lhs:
            return False
        first, second = first.rhs, second.rhs
        if name in first.free_symbols | second.free_symbols:
            return False
    a, b = _value(first, sympy), _value(second, sympy)
    return a is not None and b is not None and abs(a - b) > 1e-4 + 1e-9 * max(abs(a), abs(b))


def _value(expression: Any, sympy: Any) -> complex | None:
    """Return the value of an expression at a point that is derived from the names of its variables.

    Returns None if the expression has no value there, or if math-verify also compares it in other
    ways: it reads 9% as 9, and a variable may be a word.
    """
    if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.Symbol):
        return None
    if expression.has(sympy.UnevaluatedExpr):
        return None
    values = {
        symbol: sympy.Float(0.5 + zlib.crc32(symbol.name.encode("utf-8", "replace")) / 2**33)
        for symbol in expression.free_symbols
    }
    try:
        value = complex(expression.xreplace(values).evalf(20, maxn=60))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    return value if cmath.isfinite(value) else None
