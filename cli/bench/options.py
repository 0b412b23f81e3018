"""What the parts of `treegen bench` share: options, their checks, and how tables are shown."""

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.typed.options import JSON
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.report.tables import Listing

_MOST: Final = 9_999_999
DEVICE: Final = (
    click.option("--dtype", default="auto", metavar="TYPE", help="auto, float32, bfloat16 or "
                 "float16; auto is bfloat16 on a GPU and float32 on a CPU."),
    click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N."),
    click.option("--ceiling-seconds", type=float, metavar="S", help="For each ceiling. Default: 2 "
                 "on a GPU, 0.1 on a CPU."),
    JSON,
)  # fmt: skip


def numbers(text: str, name: str, least: int = 1) -> list[int]:
    """Return the different whole numbers of a text with commas; InputError for other texts."""
    words = [word.strip() for word in text.split(",")]
    if not all(is_number(word, least) for word in words):
        raise InputError(
            f"--{name} must be whole numbers from {least} to {_MOST:,} with commas between, got "
            f"{text!r}"
        )
    return list(dict.fromkeys(int(word) for word in words))


def is_number(word: str, least: int = 1) -> bool:
    """Return whether a word is a whole number that is neither too small nor too large."""
    # A count of digits first, for Python reads no number of thousands of digits.
    is_short = word.isascii() and word.isdecimal() and len(word) <= len(str(_MOST))
    return is_short and least <= int(word) <= _MOST


def at_least(name: str, value: int, least: int) -> None:
    """Raise InputError for an option with too small a value."""
    if value < least:
        raise InputError(f"--{name} must be at least {least}, got {value}")


def check_device(dtype: str, ceiling_seconds: float | None) -> None:
    """Raise InputError for values that the options of DEVICE cannot have."""
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if ceiling_seconds is not None and not 0 < ceiling_seconds < 60:
        raise InputError(f"--ceiling-seconds must be above 0 and below 60, got {ceiling_seconds:g}")


def check_checkpoint(model: str | None) -> None:
    """Raise ModelError for a checkpoint that is not there or lacks weights."""
    from treegen.model.checkpoint.files import check_weights, locate

    if model is not None:
        check_weights(locate(model, None, weights=True))


def headline(about: dict[str, Any]) -> str:
    """Return one line on the machine that was measured."""
    return f"torch {about['torch']}, {about['threads']} threads, {about['device']}"


def show(table: "Listing") -> None:
    """Print a table: drawn on a terminal, in Markdown elsewhere."""
    from treegen.cli.terminal.render import echo
    from treegen.common.formats import safe_text
    from treegen.report.tables import markdown

    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table()
        for place, title in enumerate(table.head):
            drawn.add_column(Text(title), justify="right" if place in table.numbers else "left")
        for row in table.rows:
            drawn.add_row(*(Text(safe_text(cell)) for cell in row))
        Console(file=sys.stdout, highlight=False).print(drawn)
    else:
        echo(markdown(table.head, table.rows, table.numbers))
    for remark in table.lines:
        echo(safe_text(remark).replace("\n", " "))
