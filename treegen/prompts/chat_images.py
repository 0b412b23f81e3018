"""Images in chat messages and their markers in rendered text; the text of turns after a reply."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.errors import InputError, arg
from treegen.prompts.images.loading import check_pixels, is_image, source_of
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.prompts.reasoning import reasoning_arguments
from treegen.prompts.tree import Message, Node


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
                f"prompt {name!r} has an image, but the model was loaded without image support; "
                f"load a model that supports images with {arg('images', True)}"
            )
        message["content"] = "\n".join(part["text"] for part in parts)
        return []
    message["content"] = [{"type": "image"} if is_image(part) else part for part in parts]
    try:
        return [table.add(source_of(part)) for part in parts if is_image(part)]
    except InputError as error:
        raise InputError(f"prompt {name!r}: {error}") from error


def open_images(
    contents: Sequence[Any], table: ImageTable | None, max_pixels: int | None = None
) -> None:
    """Decode and process the images of prompts before they are encoded.

    Args:
        contents: Prompts of one call; those that are not chat messages have no images.
        table: The model's images; None if it takes none, in which case nothing is done.
        max_pixels: Maximum pixels of all images of the call together; None for no limit.

    Raises:
        InputError: an image cannot be used, or the images have more pixels than `max_pixels`.
    """
    images = list(_sources(contents)) if table is not None else []
    if table is None or not images:
        return
    if max_pixels is not None:
        check_pixels([source for _, source in images], max_pixels)
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
    for index, content in enumerate(contents):
        for message in content if isinstance(content, list | tuple) else ():
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list | tuple) else ():
                if is_image(part):
                    yield str(index), part


def has_image_files(contents: Sequence[Any]) -> bool:
    """Return whether a prompt of a call has an image whose bytes are not in the prompt itself."""
    return any(
        not (isinstance(source, str) and source.startswith("data:"))
        for _, source in _sources(contents)
    )


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
    placeholder = _find_placeholder(tokenizer, table) if images else ""
    texts = [placeholder if is_image(part) else part["text"] for part in parts]
    return expand_image_markers("".join(texts), images, table, name), images


def _find_placeholder(tokenizer: Any, table: ImageTable) -> str:
    """Return the text that the chat template writes for an image between two texts."""
    before, after = "text before", "text after"
    parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": parts}])
    except InputError:  # the template rejects such messages, or there is none
        return table.marker
    _, _, after_marker = text.partition(before)
    placeholder, separator, _ = after_marker.partition(after)
    # Some templates move images before all text.
    return placeholder if separator and placeholder.count(table.marker) == 1 else table.marker


def get_reply_prefix(content: str | Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the text of a message that begins a reply."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" for part in content):
        raise InputError(
            f"prompt {name!r} begins the assistant's reply with an image, which is not supported; "
            "begin the reply with text"
        )
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
            f"prompt {name!r} has {len(images)} images, but its rendered chat has {len(after)} "
            f"image placeholders; remove {table.marker!r} from the text, and use a chat template "
            "that renders images"
        )
    placed = (f"{image.text}{following}" for image, following in zip(images, after, strict=True))
    return "".join((before, *placed))


_NAME = "extension"


def render_turns(
    turns: Sequence[Message],
    tokenizer: Any,
    table: ImageTable | None = None,
    *,
    before: Sequence[Message] = (),
    template: Mapping[str, Any] | None = None,
) -> tuple[str, list[PlacedImage]]:
    r"""Return the text from the end of a reply to the start of the next one, and its images.

    For the reply "4." and the turn {"role": "user", "content": "Why?"} it is, in the format of many
    templates, "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n".

    Args:
        turns: Messages after the reply, such as a tool's answer or a user's turn.
        tokenizer: The model's tokenizer.
        table: The model's images; None if it takes none.
        before: The messages before the reply. Default: a user's message.
        template: Arguments of the chat template. Default: none.

    Raises:
        InputError: the messages cannot be rendered, or an image cannot be used.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the tokenizer has no chat template; load the model with "
            f"{arg('chat_template', 'TEMPLATE')}, or append text instead of messages"
        )
    if not turns or turns[0].get("role") == "assistant":
        raise InputError("the first message after a reply must not have the role assistant")
    Node(list(turns))  # checks their form
    rendered = [dict(message) for message in turns]
    images = [image for message in rendered for image in extract_images(message, _NAME, table)]
    # The template may strip the reply, but it shows a random word unchanged.
    reply = secrets.token_hex(16)
    earlier = [without_images(message) for message in before]
    earlier = earlier or [{"role": "user", "content": "Hello."}]
    if earlier[-1].get("role") == "assistant" and not earlier[-1].get("tool_calls"):
        earlier.pop()  # the reply continues this message
    arguments = reasoning_arguments(template or {}, tokenizer)
    if not arguments.get("tools"):
        arguments.pop("tools", None)
    messages = [*earlier, {"role": "assistant", "content": reply}, *rendered]
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True, **arguments)
    except (TemplateError, TypeError) as error:
        raise InputError(
            f"the chat template rejects the messages: {error}; correct the messages"
        ) from error
    _, separator, after = text.rpartition(reply)
    if not separator:
        raise InputError(
            "the chat template does not render the reply; append text instead of messages"
        )
    return (after if table is None else expand_image_markers(after, images, table, _NAME)), images


def without_images(message: Message) -> dict[str, Any]:
    """Return a message without its images, whose tokens are in the context already."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    texts = [part["text"] for part in content if not is_image(part)]
    return {**message, "content": "\n".join(texts)}
