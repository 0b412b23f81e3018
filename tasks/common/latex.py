"""Removes LaTeX's math delimiters around an answer."""

import re
from typing import Final

_PAIRS: Final = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_DOLLAR: Final = re.compile(r"(?<!\\)\$")


def without_dollars(answer: str) -> str:
    r"""Return an answer without delimiters around all of it: $...$, $$...$$, \(...\) or \[...\].

    "\$5" keeps its currency sign, and "$1$ and $2$" keeps all of its delimiters.
    """
    answer = answer.strip()
    for opening, closing in (*_PAIRS, _PAIRS[0]):
        inner = answer[len(opening) : -len(closing)].strip()
        if answer.startswith(opening) and answer.endswith(closing) and inner.strip("$"):
            within = inner[1:-1] if inner[0] == inner[-1] == "$" else inner
            if not inner.endswith("\\") and not (opening == "$" and _DOLLAR.search(within)):
                answer = inner
    if len(_DOLLAR.findall(answer)) == 1:  # the other one of the pair is missing
        answer = answer.removeprefix("$")
        answer = answer if answer.endswith("\\$") else answer.removesuffix("$")
    return answer
