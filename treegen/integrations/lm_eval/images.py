"""Images of lm-eval's tasks, as its `hf-multimodal` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from treegen.errors import InputError
from treegen.prompts.chat_images import expand_image_markers
from treegen.prompts.images.table import ImageTable, PlacedImage

_PLACEHOLDER: Final = "<image>"  # of lm-eval's tasks


def with_images(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn whose content is a list of parts, with an image in the place of each "<image>"."""
    if not isinstance(text := turn["content"], str):
        return dict(turn)
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(text.split(_PLACEHOLDER)):
        if index:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return {**turn, "content": parts}


def load_images(table: ImageTable | None, given: Mapping[str, Any]) -> list[PlacedImage]:
    """The images of a request. given: what it has beside text.

    Raises:
        InputError: it has sound too, the model takes no images, or one cannot be used.
    """
    if "audio" in given:
        raise InputError("the task has sound, which treegen does not take")
    if table is None:
        raise InputError("the task has images; load a model that takes them with images=True")
    return [table.add(image) for image in visuals(given.get("visual", ()))]


def visuals(found: Any) -> Sequence[Any]:
    """Return what a task's `doc_to_image` gives as a list, which may be a single image."""
    return found if isinstance(found, list | tuple) else [found]


def image_tokens(
    context: str,
    images: Sequence[PlacedImage],
    table: ImageTable,
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """The token ids of a prompt with images.

    Raises:
        InputError: it has more or fewer places for images.
    """
    if table.marker not in context:  # no chat template was applied
        context = context.replace(_PLACEHOLDER, table.marker)
    ids = np.array(
        encode(expand_image_markers(context, images, table, "of a task")), dtype=np.int32
    )
    tokens: list[int] = table.place(ids, images, "of a task").tolist()
    return tokens
