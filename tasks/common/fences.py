"""Blocks of code in a text as Markdown fences them; linear in the text."""

import re
from collections.abc import Iterator
from typing import Final

# Nothing is given back, for a long line without an end would be read again from every mark.
_FENCE: Final = re.compile(
    r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+.-]*+)[^\n]*+\n", re.MULTILINE
)


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, code) of each block, up to its closing fence or the end."""
    position = 0
    while opening := _FENCE.search(text, position):
        end, position = _closing(text, opening[1], opening.end())
        yield opening[2].lower(), text[opening.end() : end]


def _closing(text: str, fence: str, start: int) -> tuple[int, int]:
    """Return where a block ends, and where the text after its closing fence begins."""
    closing = re.compile(rf"^[ \t]*+{re.escape(fence)}[`~]*+[ \t]*+$", re.MULTILINE)
    found = closing.search(text, start)
    return (found.start(), found.end()) if found else (len(text), len(text))
