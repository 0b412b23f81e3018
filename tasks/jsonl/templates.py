"""Prompt templates such as "Q: {question}", filled from the fields of a row of JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from treegen.errors import DataError
from treegen.tasks.common.jsonl import text_field


@dataclass(frozen=True, slots=True)
class Template:
    """Text with the names of fields in braces.

    parts: each is a text and the name of the field after it, or None.
    """

    parts: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> list[str]:
        """The names of all fields, in the order of their first use."""
        return list(dict.fromkeys(name for _, name in self.parts if name is not None))

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text with a row's values.

        Raises:
            ValueError: A field is missing, or is neither text nor a number.
        """
        return "".join(text + (field_text(row, name) if name else "") for text, name in self.parts)


def parse_template(text: str) -> Template:
    """Parse a template, in which {{ and }} are literal braces.

    Raises:
        DataError: The text is not a template, or names no field.
    """
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        # Python's own words, such as "Single '}' encountered in format string", are clear enough.
        raise DataError(
            f"template {text!r}: {str(error).lower()}; write {{{{ or }}}} for a brace"
        ) from None
    parts = []
    for literal, name, form, conversion in parsed:
        # {a.b} and {a!r} would reach into values; only whole fields are texts.
        if name is not None and (
            form or conversion or not name.strip() or set(name) & set(".[]{}")
        ):
            raise DataError(
                f"template {text!r}: {{...}} must hold the name of a field and nothing else; "
                "write {{ or }} for a brace"
            )
        parts.append((literal, None if name is None else name.strip()))
    if not any(name for _, name in parts):
        raise DataError(
            f"template {text!r} names no field, so all prompts would be the same; "
            f"write one, such as {{question}}"
        )
    return Template(tuple(parts))


def field_text(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row as text; a number is written as in JSON.

    Raises:
        ValueError: The field is missing, or is neither text nor a number.
    """
    value = row.get(name)
    if isinstance(value, int | float):
        return json.dumps(value)
    return text_field(dict(row), name)
