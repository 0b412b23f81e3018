"""Chats in a row of JSON: separates their images, and formats them for people."""

from collections.abc import Mapping
from typing import Any

from treegen.errors import InputError
from treegen.prompts.images.loading import is_image, source_of


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
    return tuple(_message(each, f"{name}[{at}]", images) for at, each in enumerate(value)), images


def chat_text(messages: tuple[dict[str, Any], ...]) -> str:
    """Return a chat as text for people."""
    return "\n".join(
        f"{each['role']}: {_content_to_text(each.get('content') or '')}" for each in messages
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
