r"""Finds the last \boxed{} in a text, and compares answers by the rule of MATH's authors.

Hendrycks et al. (2021), Measuring Mathematical Problem Solving With the MATH Dataset,
https://github.com/hendrycks/math. Their rule compares texts after removing what does not matter:
spaces, units, \left and \right, and shorthand. Every function is total.
"""

import re
from collections.abc import Sequence
from typing import Final

from treegen.evals.verdict import Verdict
from treegen.tasks.answers.canonical import MAX_ANSWER, MAX_TEXT

# Replacements in this order; each is applied everywhere before the next.
_REPLACED: Final = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text; None without a closed one.

    As in the original, in a text with `\boxed ` the answer is the text from the last of these up to
    the next dollar sign.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


def extract_stated(text: str) -> str:
    """Return the answer that lm-eval's task aime compares.

    It is the content of the last box, otherwise the text between the first and the last dollar
    sign, otherwise the whole text.
    """
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    first, last = text.find("$"), text.rfind("$")
    return text[first + 1 : last] if first < last else text


def hendrycks_verdict(text: str, references: Sequence[str]) -> Verdict:
    """Return the verdict on the answer in a text, compared by the rule of MATH's authors."""
    answer = extract_stated(text[-MAX_TEXT:])
    if not answer.strip() or len(answer) > MAX_ANSWER:
        return Verdict(None, False)
    form = hendrycks_form(answer)
    right = any(equivalent(answer, reference) for reference in references)
    return Verdict((answer if form is None else form) or answer, right)


def equivalent(first: str, second: str) -> bool:
    """Return whether two answers have equal forms; texts without a form are compared unchanged."""
    one, other = hendrycks_form(first), hendrycks_form(second)
    return first == second if one is None or other is None else one == other


def hendrycks_form(answer: str) -> str | None:
    """Return the canonical form of an answer; None where the original rule fails."""
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    # In MATH, "\text{ " begins a unit on the right.
    answer, unit, rest = answer.partition("\\text{ ")
    if unit and "\\text{ " in rest:
        return None
    answer = answer.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not answer:
        return answer
    if answer[0] == ".":
        answer = "0" + answer
    sides = answer.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        answer = sides[1]
    first, *roots = answer.split("\\sqrt")
    if not all(roots):
        return None  # a root without an operand
    roots = [root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}" for root in roots]
    fractions = _whole_fractions("\\sqrt".join([first, *roots]).replace(" ", ""))
    if fractions is None:
        return None
    return _as_fraction("\\frac{1}{2}" if fractions == "0.5" else fractions)


def _whole_fractions(answer: str) -> str | None:
    r"""Return an answer with \frac12 written as \frac{1}{2}; None if it ends with \frac."""
    first, *rest = answer.split("\\frac")
    parts = [first]
    for part in rest:
        if not part:
            return None
        if part[0] != "{":
            if len(part) < 2:
                return answer
            top, bottom = part[0], part[1]
            part = f"{{{top}}}{part[1:]}" if bottom == "{" else f"{{{top}}}{{{bottom}}}{part[2:]}"
        parts.append(part)
    return "\\frac".join(parts)


def _as_fraction(answer: str) -> str | None:
    r"""Return 3/4 as \frac{3}{4}, and most other answers unchanged.

    Returns None if int() fails for a side, as in the original: x/2 has no form.
    """
    sides = answer.split("/")
    if len(sides) != 2:
        return answer
    try:
        top, bottom = int(sides[0]), int(sides[1])
    except ValueError:
        return None
    return f"\\frac{{{top}}}{{{bottom}}}" if answer == f"{top}/{bottom}" else answer
