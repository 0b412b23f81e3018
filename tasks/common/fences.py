"""Blocks of code in a text as CommonMark fences them.

So a fence may be indented in a list or stand in a quotation, and three backticks that are indented
further than a fence may be, as in a docstring, are code.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

from markdown_it import MarkdownIt

# The last characters of a text, which are all that is read.
MAX_CODE: Final = 100_000
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.-]+")
_LINE: Final = re.compile(r"^[ \t]*+(?:`{3,}+|~{3,}+)[^`\n]*+$\n?", re.MULTILINE)


@cache
def _parser() -> MarkdownIt:
    # A tag alone on its line, such as </think>, would make text of a fence in the next line.
    rules = ("html_block", "reference", "heading", "lheading", "inline", "text_join")
    return MarkdownIt("commonmark").disable(rules)


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, code) of each block that is not blank.

    A block goes up to its closing fence, or to the end. Only the last MAX_CODE characters are read.
    """
    for token in _parser().parse(text[-MAX_CODE:]):
        if token.type == "fence" and token.content.strip():
            language = _LANGUAGE.search(token.info)
            yield language[0].strip(".").lower() if language else "", token.content


def between_fences(text: str) -> list[str]:
    """Return the parts of a text before, between and after all lines that look like fences.

    They have the program where a text has no more than its closing fence, because the opening one
    was in the prompt, or where a list's fence is indented and its code is not.
    """
    return _LINE.split(text[-MAX_CODE:])
