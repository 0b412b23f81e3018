"""Types of a model's reply: ToolCall, Reply and the parts of a stream."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function."""

    name: str
    arguments: dict[str, Any]
    """By name."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)
    """Its own id, to which a result refers."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text that is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of thinking."""

    text: str


Part = TextPart | ReasoningPart | ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply."""

    text: str
    """Without thoughts and calls."""
    calls: list[ToolCall]
    thoughts: str = ""
