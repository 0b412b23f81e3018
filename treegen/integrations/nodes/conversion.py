"""Converts content parts, samples, scores and errors between Python and the JSON of nodes."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from treegen.common.outputs import Completion, Score, Thinking, TopLogprobs
from treegen.errors import BusyError, ContextError, InputError, StoppedError, TreegenError
from treegen.integrations.nodes.protocol import (
    CONTEXT_ERROR,
    ErrorDetails,
    NodeAnswer,
    ScoreAnswer,
)
from treegen.prompts.tree import Parts

_ERRORS: Final[dict[int, type[TreegenError]]] = {
    429: BusyError,
    503: StoppedError,
}


def error_of(details: ErrorDetails) -> TreegenError:
    """Return the exception for an error of the server."""
    if details.type == CONTEXT_ERROR:
        return ContextError(details.message)
    return _ERRORS.get(details.code, InputError)(details.message)


def encode_parts(parts: Parts) -> list[dict[str, Any]]:
    """Return content parts as the server reads them, with images as data URLs.

    Raises:
        InputError: an image is neither a data URL nor the bytes of a file.
    """
    encoded = []
    for part in parts:
        if part.get("type") == "image":
            url = part.get("image")
            if isinstance(url, bytes):
                url = f"data:image;base64,{base64.b64encode(url).decode('ascii')}"
            if not isinstance(url, str) or not url.startswith("data:"):
                raise InputError(
                    "an image for a server must be the bytes of a file or a data URL "
                    f"(data:image/png;base64,...), got {url!r:.60}"
                )
            encoded.append({"type": "image_url", "image_url": {"url": url}})
        else:
            encoded.append(dict(part))
    return encoded


def completion_of(node: NodeAnswer, key: str) -> Completion:
    """Return the sample that a node is.

    Args:
        node: The node.
        key: Key of the node that it was sampled from.
    """
    thinking = node.thinking
    return Completion(
        prompt_id=key,
        sample_index=node.index,
        seed=node.seed or 0,
        text=node.text,
        tokens=tuple(node.token_ids),
        logprobs=tuple(node.logprobs),
        finish_reason=node.finish_reason,  # type: ignore[arg-type]  # no sample is "given"
        stop=node.stop,
        top_logprobs=tuple(tuple(pairs) for pairs in node.top_logprobs),
        confidences=tuple(node.confidences),
        certainties=tuple(node.certainties),
        thinking=None if thinking is None else Thinking(**thinking.model_dump()),
        versions=versions_of(node.versions),
    )


def versions_of(pairs: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    """Return `Completion.versions` from the pairs of an answer."""
    return tuple((version, num) for version, num in pairs)


def score_of(score: ScoreAnswer) -> Score:
    """Return the score of a continuation of a node."""
    top = None
    if score.top_logprobs:
        pairs = np.array(score.top_logprobs, dtype=np.float64)
        top = TopLogprobs(pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))
    return Score(tuple(score.token_ids), tuple(score.logprobs), score.is_greedy, top)
