"""What matches patterns in a process of its own; see treegen.common.bounded.patterns.

It imports nothing of treegen.
"""

import re
from collections.abc import Callable
from typing import Any


def prepare(source: str | None) -> Callable[[Any], Any]:
    """Return what answers requests.

    Args:
        source: A pattern, for a function from a text to the first group of the last match, or all
            of it. None is for the function `first_matches`.
    """
    if source is None:
        return first_matches
    pattern = re.compile(source)

    def last_match(text: str) -> str | None:
        found = None
        for match in pattern.finditer(text):
            found = match[1] if pattern.groups else match[0]
        return found

    return last_match


def first_matches(request: tuple[list[str], list[str]]) -> dict[str, Any]:
    """Return for each text which pattern is the first that matches at its start."""
    sources, texts = request
    patterns = []
    for source in sources:
        try:
            patterns.append(re.compile(source))
        except (re.error, OverflowError, RecursionError) as error:
            return {"refused": f"{source[:60]!r} is not a regular expression: {error}"}
    places = [
        next((place for place, each in enumerate(patterns) if each.match(text)), None)
        for text in texts
    ]
    return {"places": places}
