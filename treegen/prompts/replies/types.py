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
    """The values of the arguments, by name."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)
    """The id to which the result of the call refers."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text that is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the reasoning."""

    text: str


Part = TextPart | ReasoningPart | ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply."""

    text: str
    """The text without thoughts and calls."""
    calls: list[ToolCall]
    """The tool calls, in order."""
    thoughts: str = ""
    """The reasoning; "" if there is none."""
