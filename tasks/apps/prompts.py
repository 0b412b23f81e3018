r"""Makes the prompt of an APPS problem, and extracts the program from the reply.

This is the form of the published training code, for a problem without starter code:

    \nQUESTION:\n{question}\n\n\nUse Standard Input format\n\nANSWER:\n

The published evaluation code uses another form; see `ask`.
"""

import io
import re
import tokenize
from typing import Final

from treegen.tasks.common.fences import between_fences, fenced_blocks

PROMPTS: Final = ("train", "eval")
ANSWER: Final = "\nANSWER:\n"
EXTRACTS: Final = ("raw", "fenced")

# The beginning of a program, which prose does not have.
_CODE: Final = re.compile(
    r"\s*+(?:(?:import|from)[ ]\w|#|@\w|(?:async[ ]+)?def[ ]\w|class[ ]\w+[(:]|\w+[ ]*\(|\"\"\""
    r"|\w[\w, .\[\]]*+[ ]*[-+*/|&]?=|(?:for|while|if|with)[ ].*:[ \t]*$|try:|print\b)",
    re.MULTILINE,
)
_TAB_SIZE: Final = 8  # the width of a tab for Python's tokenizer
_NEW_INDENT: Final = 4


def ask(question: str, starter: str, *, calls: bool, form: str) -> str:
    """Return the prompt of a problem, up to where the program begins.

    The training form describes the input by whether there is starter code, the evaluation form by
    whether the tests call a function.

    Args:
        question: Text of the problem.
        starter: The starter code; empty if there is none.
        calls: Whether the tests call a function.
        form: One of PROMPTS.
    """
    if form == "train":
        kind = "Call-Based" if starter else "Standard Input"
        return f"\nQUESTION:\n{question}\n{starter}\n\nUse {kind} format\n{ANSWER}"
    kind = "Call-Based" if calls else "Standard Input"
    code = f"\n{starter}" if starter else ""
    return f"\nQUESTION:\n{question}{code}\nUse {kind} format{ANSWER}"


def extract_program(text: str, extract: str) -> str | None:
    """Return the program in a completion; None if there is none.

    Args:
        text: The completion.
        extract: "raw" uses all of it. "fenced" uses the first block marked as Python, otherwise the
            first block without a mark, up to its closing fence or the end. A single fence closes a
            block that the prompt has opened if code comes before it.
    """
    program = text if extract == "raw" else _extract_fenced(text)
    return program if program and not program.isspace() else None


def _extract_fenced(text: str) -> str | None:
    blocks = list(fenced_blocks(text))
    parts = between_fences(text)
    if len(parts) == 2 and _CODE.match(parts[0]) and not any(language for language, _ in blocks):
        return parts[0]
    for languages in (("python", "python3", "py"), ("",)):
        for language, code in blocks:
            if language in languages:
                return code
    return None


def with_tabs(source: str) -> str:
    """Return a solution indented by tabs, as in the published training code.

    Lines inside strings stay unchanged. So does a source that cannot be tokenized, such as one with
    inconsistent indentation.
    """
    source = "\n".join(line.rstrip("\r") for line in source.split("\n")).rstrip() + "\n"
    try:
        depth_at, in_string = _layout(source)
    except (tokenize.TokenError, SyntaxError):
        return source
    lines = source.split("\n")
    shift = 0
    for row, line in enumerate(lines):
        body = line.lstrip(" \t")
        if row in in_string or not body:
            continue
        width = len(line[: len(line) - len(body)].expandtabs(_TAB_SIZE))
        if row in depth_at:
            shift = _NEW_INDENT * depth_at[row] - width
        tabs, spaces = divmod(max(0, width + shift), _NEW_INDENT)
        lines[row] = "\t" * tabs + " " * spaces + body
    return "\n".join(lines)


def _layout(source: str) -> tuple[dict[int, int], set[int]]:
    """Return the depth of each row that begins a statement, and the rows that continue a string."""
    depth_at: dict[int, int] = {}
    in_string: set[int] = set()
    depth, begins = 0, True
    opened: list[int] = []  # rows where f-strings begin, because their parts are separate tokens
    comments: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        first, last = token.start[0] - 1, token.end[0] - 1
        if name in ("INDENT", "DEDENT"):
            depth += 1 if name == "INDENT" else -1
        elif name == "COMMENT" and begins:
            comments.append(first)  # a comment has the depth of the statement after it
        elif name == "NEWLINE":
            begins = True
        elif name not in ("NL", "COMMENT", "ENDMARKER"):
            if begins:
                depth_at |= dict.fromkeys([*comments, first], depth)
                comments.clear()
            begins = False
        if name == "STRING":
            in_string |= set(range(first + 1, last + 1))
        elif name == "FSTRING_START":
            opened.append(first)
        elif name == "FSTRING_END":
            in_string |= set(range(opened.pop() + 1, last + 1))
    return depth_at | dict.fromkeys(comments, 0), in_string
