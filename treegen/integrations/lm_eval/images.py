"""Images of lm-eval's tasks, handled as by its `hf-multimodal`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from treegen.errors import InputError, arg
from treegen.prompts.chat_images import expand_image_markers
from treegen.prompts.images.table import ImageTable, PlacedImage

_PLACEHOLDER: Final = "<image>"  # marks an image in the texts of lm-eval's tasks


def with_images(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whose content is a list of parts, with an image in place of each "<image>"."""
    if not isinstance(text := turn["content"], str):
        return dict(turn)
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(text.split(_PLACEHOLDER)):
        if index:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return {**turn, "content": parts}


def load_images(table: ImageTable | None, inputs: Mapping[str, Any]) -> list[PlacedImage]:
    """Return the images of a request.

    Args:
        table: The model's images; None for a model without images.
        inputs: The inputs of the request apart from its text.

    Raises:
        InputError: The request also has sound, the model takes no images, or an image cannot be
            used.
    """
    if "audio" in inputs:
        raise InputError("treegen does not support audio; remove this task")
    if table is None:
        raise InputError(
            f"the task has images; load a model that accepts images with {arg('images', True)}"
        )
    return [table.add(image) for image in visuals(inputs.get("visual", ()))]


def visuals(images: Any) -> Sequence[Any]:
    """Return the images of a task's `doc_to_image` as a list; it may return a single image."""
    return images if isinstance(images, list | tuple) else [images]


def image_tokens(
    context: str,
    images: Sequence[PlacedImage],
    table: ImageTable,
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Return the token ids of a prompt with images.

    Args:
        context: Text of the prompt, with a marker for each image.
        images: The images, in the order of their markers.
        table: The model's images.
        encode: Returns the token ids of a text.

    Raises:
        InputError: The numbers of markers and images differ.
    """
    if table.marker not in context:  # no chat template was applied
        context = context.replace(_PLACEHOLDER, table.marker)
    ids = np.array(
        encode(expand_image_markers(context, images, table, "of a task")), dtype=np.int32
    )
    tokens: list[int] = table.place(ids, images, "of a task").tolist()
    return tokens
