"""Prompt templates such as "Q: {question}", and chats, filled from the fields of a row of JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from treegen.errors import DataError, InputError
from treegen.prompts.images.loading import is_image, source_of
from treegen.tasks.common.files import text_field


@dataclass(frozen=True, slots=True)
class Template:
    """Text with the names of fields in braces."""

    parts: tuple[tuple[str, str | None], ...]
    """Each is a text and the name of the field after it, or None."""

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


def chat_of(row: Mapping[str, Any], name: str) -> tuple[tuple[dict[str, Any], ...], list[Any]]:
    """Return the chat messages in a field of a row, and the images in them.

    In the messages each image is replaced by its index in the list of images.

    Raises:
        ValueError: The field has no messages, or a message is invalid.
    """
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of chat messages")
    images: list[Any] = []
    return tuple(
        _message(message, f"{name}[{at}]", images) for at, message in enumerate(value)
    ), images


def chat_text(messages: tuple[dict[str, Any], ...]) -> str:
    """Return a chat as text for people."""
    return "\n".join(
        f"{message['role']}: {_content_to_text(message.get('content') or '')}"
        for message in messages
    )


def _message(message: Any, where: str, images: list[Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is no chat message; write an object with role and content")
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ValueError(f"the content of {where} is neither text nor a list of parts")
        return dict(message)
    return {**message, "content": [_part(part, where, images) for part in content]}


def _part(part: Any, where: str, images: list[Any]) -> dict[str, Any]:
    if is_image(part):
        try:
            images.append(source_of(part))
        except InputError as error:
            raise ValueError(f"{where}: {error}") from None
        return {"type": "image", "image": len(images) - 1}
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"a part of {where} is neither text nor an image")
    return {"type": "text", "text": part["text"]}


def _content_to_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        f"<image {part['image'] + 1}>" if is_image(part) else part["text"] for part in content
    )
