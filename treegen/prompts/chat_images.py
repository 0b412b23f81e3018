"""Images in chat messages: extracting them, and expanding their markers in the rendered text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treegen.common.bounded.templates import render_chat
from treegen.errors import InputError, arg
from treegen.prompts.images.loading import check_pixels, is_image, source_of
from treegen.prompts.images.table import ImageTable, PlacedImage


def extract_images(
    message: dict[str, Any], name: str, table: ImageTable | None
) -> list[PlacedImage]:
    """Return the images of a message, and leave placeholders for them in the message.

    Args:
        message: A chat message; its content is replaced.
        name: The prompt's name in error messages.
        table: The model's images; None if it takes none.

    Raises:
        InputError: an image cannot be used, or the model takes none.
    """
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return []
    if table is None:
        if any(map(is_image, parts)):
            raise InputError(
                f"prompt {name!r} has an image, but images are not taken here; load a model that "
                f"takes them with {arg('images', True)}"
            )
        message["content"] = "\n".join(part["text"] for part in parts)
        return []
    message["content"] = [{"type": "image"} if is_image(part) else part for part in parts]
    try:
        return [table.add(source_of(part)) for part in parts if is_image(part)]
    except InputError as error:
        raise InputError(f"prompt {name!r}: {error}") from error


def open_images(
    contents: Sequence[Any], table: ImageTable | None, most_pixels: int | None = None
) -> None:
    """Decode and process the images of prompts before they are encoded.

    Args:
        contents: Prompts of one call; those that are not chat messages have no images.
        table: The model's images; None if it takes none, in which case nothing is done.
        most_pixels: Maximum pixels of all images of the call together; None for no limit.

    Raises:
        InputError: an image cannot be used, or the images have more pixels than `most_pixels`.
    """
    images = list(_sources(contents)) if table is not None else []
    if table is None or not images:
        return
    if most_pixels is not None:
        check_pixels([source for _, source in images], most_pixels)
    for name, source in images:
        try:
            table.add(source)
        except InputError as error:
            raise InputError(f"prompt {name!r}: {error}") from error


def has_images(contents: Sequence[Any]) -> bool:
    """Return whether a prompt of a call has an image."""
    return any(True for _ in _image_parts(contents))


def _image_parts(contents: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of chat messages that are images, with the names of their prompts."""
    for place, content in enumerate(contents):
        for message in content if isinstance(content, list | tuple) else ():
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list | tuple) else ():
                if is_image(part):
                    yield str(place), part


def _sources(contents: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, part in _image_parts(contents):
        try:
            yield name, source_of(part)
        except InputError as error:
            raise InputError(f"prompt {name!r}: {error}") from error


def render_parts(
    parts: Sequence[Mapping[str, Any]], tokenizer: Any, table: ImageTable | None, name: str
) -> tuple[str, list[PlacedImage]]:
    """Return content parts as one text to append, with its images' placeholders, and the images.

    If the chat template surrounds images with text, this text is included.

    Args:
        parts: The parts: texts and images.
        tokenizer: The model's tokenizer.
        table: The model's images; None if it takes none.
        name: The text's name in error messages.

    Raises:
        InputError: an image cannot be used, or the model takes none.
    """
    message: dict[str, Any] = {"content": list(parts)}
    images = extract_images(message, name, table)
    if table is None:
        return "".join(part["text"] for part in parts), []
    place = _place(tokenizer, table) if images else ""
    texts = [place if is_image(part) else part["text"] for part in parts]
    return expand_image_markers("".join(texts), images, table, name), images


def _place(tokenizer: Any, table: ImageTable) -> str:
    """Return the text that the chat template writes for an image between two texts."""
    before, after = "text before", "text after"
    parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": parts}])
    except InputError:  # the template rejects such messages, or there is none
        return table.marker
    _, _, rest = text.partition(before)
    place, separator, _ = rest.partition(after)
    # Some templates move images before all text.
    return place if separator and place.count(table.marker) == 1 else table.marker


def get_reply_prefix(content: str | Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the text of a message that begins a reply."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" for part in content):
        raise InputError(f"prompt {name!r} begins a reply with an image; give text")
    return "".join(part["text"] for part in content)


def expand_image_markers(
    text: str, images: Sequence[PlacedImage], table: ImageTable, name: str
) -> str:
    """Return a text with each image marker replaced by the image's own text.

    Args:
        text: The rendered text.
        images: The images, in the order of their markers.
        table: The model's images.
        name: The prompt's name in error messages.

    Raises:
        InputError: the number of markers differs from the number of images.
    """
    before, *after = text.split(table.marker)
    if len(after) != len(images):
        raise InputError(
            f"prompt {name!r} has {len(images)} images but {len(after)} places for them in its "
            f"rendered chat; a text must not have {table.marker!r} in it, and the chat template "
            "must show images"
        )
    placed = (f"{image.text}{rest}" for image, rest in zip(images, after, strict=True))
    return "".join((before, *placed))
