"""The text of chat messages that follow a reply which the model has written."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.errors import InputError, arg
from treegen.prompts.chat_images import expand_image_markers, extract_images
from treegen.prompts.images.loading import is_image
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.prompts.reasoning import reasoning_arguments
from treegen.prompts.tree import Message, Node

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
            f"{arg('chat_template', 'FILE')}, or append text"
        )
    if not turns or turns[0].get("role") == "assistant":
        raise InputError("messages after a reply start with another role than assistant")
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
        raise InputError(f"the chat template refuses the messages: {error}; mend them") from error
    _, separator, after = text.rpartition(reply)
    if not separator:
        raise InputError("the chat template does not show the reply; append text instead")
    return (after if table is None else expand_image_markers(after, images, table, _NAME)), images


def without_images(message: Message) -> dict[str, Any]:
    """Return a message without its images, whose tokens are in the context already."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    texts = [part["text"] for part in content if not is_image(part)]
    return {**message, "content": "\n".join(texts)}
