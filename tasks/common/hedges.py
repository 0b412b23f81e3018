"""Detects statements that a text only considers, as in "if the answer is 5"."""

import re
from typing import Final

_WINDOW: Final = 64
_HEDGE: Final = re.compile(
    r"(?:\b(?:if|whether|unless|suppose|supposing|assume|assuming|doubt)"
    r"|(?:\b(?:not|never|cannot)|n['\u2019]t)"
    r"(?:[ ]+(?:think|believe|say|mean|true|sure|certain|possible|likely|clear|the[ ]case|be))?)"
    r"(?:[ ]+that)?(?:[ ]+(?:the|my|our|an?|its))?"
    r"(?:[ ]+(?:final|correct|right|best|only|option|choice|answer|statement)){0,3}"
    r"[ ]*[(*\"']{0,3}\Z",
    re.IGNORECASE,
)


def is_hedged(text: str, at: int) -> bool:
    """Return whether the words before `at` deny or only suppose the text that begins there."""
    return bool(_HEDGE.search(text[max(at - _WINDOW, 0) : at]))
