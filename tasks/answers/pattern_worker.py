"""What matches users' patterns in a process of its own; see treegen.tasks.answers.patterns.

It imports nothing of treegen.
"""

import re
from collections.abc import Callable


def prepare(source: str) -> Callable[[str], str | None]:
    """Return a function from a text to the first group of the last match, or all of it."""
    pattern = re.compile(source)

    def last_match(text: str) -> str | None:
        found = None
        for match in pattern.finditer(text):
            found = match[1] if pattern.groups else match[0]
        return found

    return last_match
