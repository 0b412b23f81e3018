"""The program in an answer of a chat model."""

import re
from collections.abc import Collection

from treegen.tasks.common.fences import between_fences, fenced_blocks


def defines(code: str, names: Collection[str]) -> bool:
    """Return whether a line of the code begins to define one of the names."""
    if not names:
        return False
    choice = "|".join(map(re.escape, names))
    found = re.search(
        rf"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{choice})\b|^(?:{choice})[ \t]*=", code, re.M
    )
    return found is not None


def block_that_defines(text: str, names: Collection[str]) -> str | None:
    """Return the last fenced block that defines one of the names, else the last block.

    If no block does, the last part of the text between fences that defines one is the program: the
    whole answer if it has no fence. Otherwise there is no program, hence None.
    """
    blocks = [code for _, code in fenced_blocks(text)]
    for code in (*reversed(blocks), *reversed(between_fences(text))):
        if defines(code, names):
            return code
    return blocks[-1] if blocks else None


def text_before(prompt: str, name: str) -> str:
    """Return what stands in a prompt before the function: imports, and functions to help."""
    found = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""
