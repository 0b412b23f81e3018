"""Prompts with images, and how far numbers are from others."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from treegen import Node
from treegen.prompts.images.table import ImageTable


def user(*parts: Any) -> dict[str, Any]:
    """A turn of the user: images and texts."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in parts
        ],
    }


def encode_image(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    """The bytes of a file with an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def url_of(content: Image.Image | bytes) -> str:
    """A data URL of an image, or of the bytes of a file."""
    data = content if isinstance(content, bytes) else encode_image(content)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def table_of(llm: Any) -> ImageTable:
    """The table of an LLM that reads images."""
    table: ImageTable | None = llm.images
    assert table is not None
    return table


def far(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def tree_of(a: Any, b: Any) -> tuple[Node, dict[str, list[dict[str, Any]]]]:
    """A tree with images at its root, below it and at leaves; and the messages of each leaf."""
    top, below = user(a, "What is here?"), {"role": "assistant", "content": "A thing."}
    last = {
        "plain": user("And what is beside it?"),
        "other": user("Is it like this: ", b, "?"),
        "again": user(a, "is the same. Why?"),
    }
    alone = {
        "b": [user(b, "What is here?")],
        "none": [{"role": "user", "content": "What?"}],
        "two": [user("Compare ", b, " and ", a, ".")],
    }
    leaves = [Node([turn], id=name) for name, turn in last.items()]
    root = Node(
        children=[
            Node([top], samples=1, id="top", children=[Node([below], children=leaves)]),
            *(Node(turns, id=name) for name, turns in alone.items()),
        ],
        samples=0,
    )
    paths = {name: [top, below, turn] for name, turn in last.items()}
    return root, {"top": [top], **paths, **alone}


def image_question(image: Any, text: str = "What?", kind: str = "image") -> list[dict[str, Any]]:
    """A question on an image. kind: the key under which the part has it."""
    parts = [{"type": "image", kind: image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]
