"""Hooks of `make docs`: write generated tables, and mark what stays whole in table cells."""

import re
from inspect import cleandoc
from typing import Any

import click

# In help texts, this character keeps click from filling a paragraph.
_NO_FILL = re.compile("\b")
_CELL = re.compile("<td.*?</td>", re.DOTALL)
_CELL_CODE = re.compile("<code>([^<]+)</code>")
_CELL_TEXT = re.compile(">[^<]+<")
_RANGE = re.compile(
    r"\(?\b\d[\d,.]*-\d[\d,.-]*\b\)?"
)  # a range of numbers, or a date
_BLOCK = re.compile("(<pre.*?</pre>)", re.DOTALL)
_INLINE_CODE = re.compile("<code>[^<]+</code>")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
_SHORT = 12  # characters of a word that fits into a column of a phone


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of generated tables by the tables."""
    writers = {
        "<!-- commands -->": commands,
        "<!-- families -->": families,
        "<!-- inputs -->": inputs,
    }
    for marker, write in writers.items():
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Mark options, and words, ranges and dates in table cells; lines do not break in them."""
    marked = _CELL.sub(lambda cell: _mark_cell(cell[0]), html)
    parts = _BLOCK.split(marked)  # every second part is a block of code
    parts[::2] = [_INLINE_CODE.sub(_mark_options, part) for part in parts[::2]]
    return "".join(parts)


def _mark_cell(cell: str) -> str:
    marked = _CELL_TEXT.sub(
        lambda text: _RANGE.sub(r'<span class="range">\g<0></span>', text[0]),
        cell,
    )
    return _CELL_CODE.sub(_mark_words, marked)


def _mark_options(code: re.Match[str]) -> str:
    return _OPTION.sub(r'<span class="option">\g<0></span>', code[0])


def _mark_words(code: re.Match[str]) -> str:
    words = code[1].split(" ")
    if len(words) == 1 and len(words[0]) > _SHORT:
        return code[0]  # a long name alone may break
    marked = (
        f'<span class="short">{word}</span>'
        if len(word) <= _SHORT
        else f"<span>{word}</span>"
        for word in words
    )
    return f"<code>{' '.join(marked)}</code>"


def commands() -> str:
    """Return a section for each command with its usage, its help text and a table of options."""
    from treegen.cli.main import cli

    return "\n\n".join(_sections(cli, "treegen"))


def _sections(group: click.Group, name: str) -> list[str]:
    context = click.Context(group, info_name=name)
    sections = []
    for subcommand in group.list_commands(context):
        command = group.get_command(context, subcommand)
        assert command is not None
        full_name = f"{name} {subcommand}"
        sections.append(_section(command, full_name))
        if isinstance(command, click.Group):
            sections += _sections(command, full_name)
    return sections


def _section(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    help_text = _NO_FILL.sub("", cleandoc(command.help or ""))
    lines = [f"## {name}", f"```text\n{usage}\n```", help_text]
    records = [option.get_help_record(context) for option in command.params]
    visible = [record for record in records if record]
    if visible:
        rows = [
            f"| {_code(names)} | {_cell(help)} |" for names, help in visible
        ]
        lines.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(lines)


def _cell(text: str) -> str:
    """Return text for one cell, with markup characters escaped."""
    text = " ".join(text.split())
    for mark in ("\\", "|", "<", "*", "_", "["):
        text = text.replace(mark, f"&#{ord(mark)};")
    return text


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>"


def families() -> str:
    """Return a table of every family that the installed transformers generates text with."""
    from treegen.model.checkpoint.families import all_families

    rows = [
        f"| `{f.model_type}` | {f.support} | {', '.join(f.takes)} | {_cell(f.why or '')} |"
        for f in all_families()
    ]
    return "\n".join(
        ["| family | how it runs | takes | why |", "|---|---|---|---|", *rows]
    )


def inputs() -> str:
    """Return a table of the inputs of families that take more than text in transformers."""
    from treegen.model.checkpoint.families import (
        IMAGES,
        ON_TEXT,
        SOUND,
        inputs_of,
    )

    kinds = ("text", "images", "sound")
    rows = []
    for name in sorted({*ON_TEXT, *IMAGES, *SOUND}):
        takes = inputs_of(name)
        rows.append(
            " | ".join(
                [f"| `{name}`", *("yes" if k in takes else "" for k in kinds)]
            )
        )
    return "\n".join(
        ["| family | text | images | sound |", "|---|---|---|---|", *rows]
    )
