"""Formats sizes, tables and errors for people, and parses sizes. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from treegen.errors import InputError, arg

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of nested mappings.

    Args:
        values: The mappings; an empty one is a leaf.
        prefix: Precedes the names.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parse_bytes(amount: int | str, name: str = "memory") -> int:
    """Return the bytes of a size such as 2_000_000, "512MiB" or "2 GiB".

    Args:
        amount: The size.
        name: Name of the parameter in messages. Default: "memory".

    Raises:
        InputError: It is not such a size, or not positive.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    pattern = r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*"
    match = re.fullmatch(pattern, amount) if isinstance(amount, str) else None
    if match and match[2].lower() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].lower()])
        if size > 0:
            return size
    raise InputError(
        f"{arg(name)} must be a number of bytes, or a size such as '2GiB', got {amount!r:.60}"
    )


def format_bytes(size: float) -> str:
    """Return a size with a suitable unit: "512 B", "1.5 KiB", "16.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


# Unsafe characters: C0 except tab and newline, DEL, C1, the characters of Unicode's Bidi_Control
# property, the line and paragraph separators (some terminals and pagers break lines there), and
# lone surrogates, which UTF-8 cannot encode.
_UNSAFE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

# The safe characters of ASCII, by which most texts are found to be safe at once.
_SAFE: Final = bytes([9, 10, *range(32, 127)])


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def safe_text(text: str) -> str:
    r"""Return `text` with every character that could steer a terminal written out, as in \x1b.

    Newline and tab stay. The result encodes in UTF-8 and is unchanged by a second call. It may
    still contain rich markup: print it as `rich.text.Text`, or with `markup=False`. Backslashes are
    not doubled, so it is for reading and cannot be converted back.
    """
    if text.isascii() and not text.encode("ascii").translate(None, _SAFE):
        return text
    return _UNSAFE.sub(_escape, text)


def replace_surrogates(text: str) -> str:
    """Return a text that UTF-8 can encode: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table in Markdown.

    Args:
        head: The column headings.
        rows: The cells of each row.
        right: Indices of the columns to align on the right, such as numbers.
    """
    cells = [[safe_line(text).replace("|", "\\|") for text in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        "|".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = "|".join(
        "-" * (width - 1) + ":" if i in right else "-" * width for i, width in enumerate(widths)
    )
    return "\n".join(f"|{line}|" for line in (lines[0], rule, *lines[1:]))


def safe_line(text: str) -> str:
    """Return a text in one line, safe to display as by `safe_text`."""
    return safe_text(text).replace("\n", " ")


def summarize_error(error: BaseException) -> str:
    """Return the first meaningful line of an error's text, at most 300 characters.

    A line that ends in a colon is joined with the next line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines))
    return (" ".join(lines[: last + 1]) if lines else type(error).__name__)[:300]
