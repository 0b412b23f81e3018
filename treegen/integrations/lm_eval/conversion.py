"""Converts the settings and the images of lm-eval's requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from treegen.common.params import REQUEST_FIELDS, SamplingParams
from treegen.errors import InputError, arg
from treegen.prompts.chat_images import expand_image_markers
from treegen.prompts.images.table import ImageTable, PlacedImage

# Settings of other engines, each with the value that changes nothing.
_NEUTRAL: Final[Mapping[str, object]] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "n": 1,
    "typical_p": 1,
    "use_cache": True,
}


@dataclass(frozen=True, slots=True)
class GenSettings:
    """The generation settings of a request."""

    params: SamplingParams
    """How its sample is drawn."""
    until: tuple[str, ...]
    """The texts at which its answer is cut, including the text of the end-of-sequence token."""


def gen_settings(
    gen_kwargs: Mapping[str, Any],
    *,
    max_gen_toks: int,
    seed: int,
    eos: str | None,
    has_reasoning: bool,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> GenSettings:
    """Return the settings in a request's gen_kwargs, where None means that a setting is not given.

    Supported are REQUEST_FIELDS, `until`, `do_sample`, and max_gen_toks under its four names.

    Args:
        gen_kwargs: Generation settings of the request.
        max_gen_toks: Maximum number of tokens of an answer, if gen_kwargs give none.
        seed: Seed, if gen_kwargs give none.
        eos: Text of the end-of-sequence token.
        has_reasoning: Whether reasoning comes before the answer. Reasoning may contain any text, so
            stop strings do not end the sample, and only cut its answer.
        defaults: Defaults for settings that gen_kwargs do not give; a greedy request stays greedy.

    Raises:
        InputError: A setting is not supported, or has an invalid value.
    """
    set_kwargs = {name: value for name, value in gen_kwargs.items() if value is not None}
    try:
        normalized: dict[str, Any] = dict(normalize_gen_kwargs(set_kwargs, max_gen_toks))
        until = handle_stop_sequences(
            normalized.pop("until"), None if normalized.get("ignore_eos") else eos
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{arg('gen_kwargs')} {dict(gen_kwargs)!r} cannot be read: {error}; use the form "
            "name=value,name=value"
        ) from None
    length, do_sample = normalized.pop("max_gen_toks"), normalized.pop("do_sample")
    unsupported = [
        f"{name}={value!r}"
        for name, value in normalized.items()
        if name not in REQUEST_FIELDS and (name not in _NEUTRAL or value != _NEUTRAL[name])
    ]
    if unsupported:
        raise InputError(
            f"{arg('gen_kwargs')} with {', '.join(unsupported)} is not supported; use only until, "
            f"{arg('do_sample')}, max_gen_toks, {', '.join(REQUEST_FIELDS)}"
        )
    supported: dict[str, Any] = {
        name: normalized[name] for name in REQUEST_FIELDS if name in normalized
    }
    if "temperature" not in set_kwargs:  # lm-eval fills in 0
        supported.pop("temperature", None)
    settings = {**defaults, **supported}
    settings.setdefault("seed", seed)
    settings["temperature"] = settings.get("temperature", 0.0) if do_sample else 0.0
    until = tuple(text for text in until if text != "")
    stop = [text for text in until if text == eos] if has_reasoning else until
    return GenSettings(SamplingParams(max_tokens=length, stop=stop, **settings), until)


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
    return [table.add(image) for image in as_image_list(inputs.get("visual", ()))]


def as_image_list(images: Any) -> Sequence[Any]:
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
    tokens: list[int] = table.replace_placeholders(ids, images, "of a task").tolist()
    return tokens
