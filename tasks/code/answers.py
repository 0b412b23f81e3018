"""Finds the program in an answer of a chat model."""

import re
from collections.abc import Collection

from treegen.tasks.common.fences import between_fences, fenced_blocks


def defines(code: str, names: Collection[str]) -> bool:
    """Return whether a line of the code begins a definition of one of the names."""
    if not names:
        return False
    choice = "|".join(map(re.escape, names))
    found = re.search(
        rf"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{choice})\b|^(?:{choice})[ \t]*=", code, re.M
    )
    return found is not None


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
    found = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""
