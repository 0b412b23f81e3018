"""Images in the messages of a chat: taken out of them, and put into the rendered text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treegen.common.bounded.templates import render_chat
from treegen.errors import InputError
from treegen.prompts.images.loading import check_pixels, is_image, source_of
from treegen.prompts.images.table import ImageTable, PlacedImage, get_image_table


def extract_images(
    message: dict[str, Any], name: str, table: ImageTable | None
) -> list[PlacedImage]:
    """The images of a message, which has places for them afterwards. name: the prompt's."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return []
    if table is None:
        if any(map(is_image, parts)):
            raise InputError(
                f"prompt {name!r} has an image, but images are not taken here; load a model that "
                "takes them with images=True (--images)"
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
    """Decode and process the images of prompts, so that encoding these finds them.

    Args:
        contents: Prompts of one call; those that are not chat messages have no images.
        table: The model's images; None where it takes none, so that nothing is done.
        most_pixels: Pixels that all images of the call may have together; None for any number.

    Raises:
        InputError: An image cannot be used, or the images have more pixels than they may.
    """
    found = list(_sources(contents)) if table is not None else []
    if table is None or not found:
        return
    if most_pixels is not None:
        check_pixels([source for _, source in found], most_pixels)
    for name, source in found:
        try:
            table.add(source)
        except InputError as error:
            raise InputError(f"prompt {name!r}: {error}") from error


def has_images(contents: Sequence[Any]) -> bool:
    """Return whether a prompt of a call has an image."""
    return any(True for _ in _image_parts(contents))


def _image_parts(contents: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield parts of chat messages that are images, with the names of their prompts."""
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
    parts: Sequence[Mapping[str, Any]], tokenizer: Any, name: str
) -> tuple[str, list[PlacedImage]]:
    """Parts as a text to append, with what stands in it for its images, and these.

    A chat template may put something around images; it stands there in the text too. name: what
    messages call the text.

    Raises:
        InputError: an image cannot be used, or none is taken here.
    """
    table = get_image_table(tokenizer)
    message: dict[str, Any] = {"content": list(parts)}
    images = extract_images(message, name, table)
    if table is None:
        return "".join(part["text"] for part in parts), []
    place = _place(tokenizer, table) if images else ""
    texts = [place if is_image(part) else part["text"] for part in parts]
    return expand_image_markers("".join(texts), images, table, name), images


def _place(tokenizer: Any, table: ImageTable) -> str:
    """The text that the chat template has between two texts with an image in between."""
    before, after = "text before", "text after"
    parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": parts}])
    except InputError:  # the template refuses such messages, or there is none
        return table.marker
    _, _, rest = text.partition(before)
    place, found, _ = rest.partition(after)
    # Some templates have images before all text.
    return place if found and place.count(table.marker) == 1 else table.marker


def get_reply_prefix(content: str | Sequence[Mapping[str, Any]], name: str) -> str:
    """The text of a message that a reply begins with."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" for part in content):
        raise InputError(f"prompt {name!r} begins a reply with an image; give text")
    return "".join(part["text"] for part in content)


def expand_image_markers(
    text: str, images: Sequence[PlacedImage], table: ImageTable, name: str
) -> str:
    """Return a text with what stands in it for each image. name: the prompt's.

    Raises:
        InputError: it has more or fewer places for images.
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
