"""Lone surrogates: characters that a Python string can hold but no text encoding can."""

from __future__ import annotations


def describe_lone_surrogate(text: str) -> str | None:
    """Return a phrase that describes the first lone surrogate of a text; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return f"has the lone surrogate U+{code:04X} at character {error.start:,}; replace it"
    return None
