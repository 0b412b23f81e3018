"""Blocks of code in a text, fenced as CommonMark defines.

A fence may be indented in a list or be part of a quotation. Three backticks that are indented
further than a fence may be, as in a docstring, belong to the code.
"""

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Final

from markdown_it import MarkdownIt

# Only this many characters at the end of a text are read.
MAX_CODE: Final = 100_000
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.-]+")
_LINE: Final = re.compile(r"^[ \t]*+(?:`{3,}+|~{3,}+)[^`\n]*+$\n?", re.MULTILINE)


@cache
def _parser() -> MarkdownIt:
    # With HTML blocks, a tag alone on its line, such as </think>, would hide a fence right below.
    rules = ("html_block", "reference", "heading", "lheading", "inline", "text_join")
    return MarkdownIt("commonmark").disable(rules)


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, code) of each block that is not blank.

    A block without a closing fence ends with the text. Only the last MAX_CODE characters are read.
    """
    for token in _parser().parse(text[-MAX_CODE:]):
        if token.type == "fence" and token.content.strip():
            language = _LANGUAGE.search(token.info)
            yield language[0].strip(".").lower() if language else "", token.content


def between_fences(text: str) -> list[str]:
    """Return the parts of a text before, between and after all lines that look like fences.

    One of the parts is the program if the text has only a closing fence, because the opening one
    was in the prompt, or if a fence in a list is indented and its code is not.
    """
    return _LINE.split(text[-MAX_CODE:])


def defines(code: str, names: Collection[str]) -> bool:
    """Return whether a line of the code begins a definition of one of the names."""
    if not names:
        return False
    choice = "|".join(map(re.escape, names))
    match = re.search(
        rf"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{choice})\b|^(?:{choice})[ \t]*=", code, re.M
    )
    return match is not None


def block_that_defines(text: str, names: Collection[str]) -> str | None:
    """Return the last fenced block that defines one of the names, otherwise the last block.

    If no block defines one, the last part of the text between fences that does is the program;
    without fences this part is the whole answer. Returns None if there is no such part and no
    block.
    """
    blocks = [code for _, code in fenced_blocks(text)]
    for code in (*reversed(blocks), *reversed(between_fences(text))):
        if defines(code, names):
            return code
    return blocks[-1] if blocks else None


def text_before(prompt: str, name: str) -> str:
    """Return the part of a prompt before the function: imports and helper functions."""
    match = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: match.start()] if match else ""
