"""Matches patterns in a separate process; see treegen.common.bounded.patterns.

It imports nothing of treegen.
"""

import re
from collections.abc import Callable
from typing import Any


def prepare(setup: list[str]) -> Callable[[Any], Any]:
    """Return the function that answers requests.

    Args:
        setup: "last" and a pattern, for a function from a text to the first group of the last
            match, or all of the match without groups; or "first" or "count", for `first_matches` or
            `count_matches`.
    """
    kind, *sources = setup
    if kind == "first":
        return first_matches
    if kind == "count":
        return count_matches
    pattern = re.compile(sources[0])

    def last_match(text: str) -> str | None:
        last = None
        for match in pattern.finditer(text):
            last = match[1] if pattern.groups else match[0]
        return last

    return last_match


def first_matches(request: tuple[list[str], list[str]]) -> dict[str, Any]:
    """Return for each text the index of the first pattern that matches at its start."""
    sources, texts = request
    patterns = []
    for source in sources:
        try:
            patterns.append(re.compile(source))
        except (re.error, OverflowError, RecursionError) as error:
            return {"rejected": f"{source[:60]!r} is not a regular expression: {error}"}
    indices = [
        next((index for index, pattern in enumerate(patterns) if pattern.match(text)), None)
        for text in texts
    ]
    return {"indices": indices}


def count_matches(request: tuple[str, int, str]) -> int:
    """Return how often a pattern is found in a text."""
    source, flags, text = request
    return sum(1 for _ in re.compile(source, flags).finditer(text))
