"""Tool calls in the text that a model has generated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_TAGGED: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. arguments: by name."""

    name: str
    arguments: dict[str, Any]


def tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its tool calls, and the calls.

    Two forms are known: JSON between <tool_call> and </tool_call> (Hermes, Qwen and others), and a
    text that is one JSON object with name and parameters or arguments (Llama 3). What is neither
    stays text.
    """
    found: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read(match[1])
        if call is None:
            return match[0]
        found.append(call)
        return ""

    rest = _TAGGED.sub(take, text)
    if found:
        return rest.strip(), found
    call = _read(text.strip().removeprefix("<|python_tag|>"))
    return ("", [call]) if call else (text, [])


def _read(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
