"""What a model has said: its thoughts, its text, and the tool calls in it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from treegen.outputs import Completion
from treegen.prompts.thinking import without_tags

_TAGGED: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning", "thoughts")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. arguments: by name. id: its own, by which a result names it."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model has said. text: without thoughts and calls."""

    text: str
    calls: list[ToolCall]
    thoughts: str = ""


def read_reply(
    completion: Completion, prompt: Sequence[int], tokenizer: Any, tools: Sequence[Any] | None
) -> Reply:
    """Take a completion apart.

    A tokenizer with a `response_template` says how its model writes. For others, thoughts are the
    completion's `thinking` if that is known, or else end with </think>; and `tool_calls` finds the
    calls if there are tools.

    prompt: the token ids before it. tools: as the chat template had them.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        reply = _by_template(completion, prompt, tokenizer, tools)
        if reply is not None:
            return reply
    if completion.thinking is not None:
        thoughts = without_tags(completion.text[: completion.thinking.end], tokenizer)
        text = completion.answer
    else:
        before, _, text = completion.text.rpartition("</think>")
        thoughts = before.strip().removeprefix("<think>").strip()
        text = text.strip() if before else text
    text, calls = tool_calls(text) if tools else (text, [])
    return Reply(text, calls, thoughts)


def tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its tool calls, and the calls.

    Two forms are known: JSON between <tool_call> and </tool_call> (Hermes, Qwen and others), and a
    text that is one JSON object with name and parameters or arguments (Llama 3). What is neither
    stays text.
    """
    found: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read(match[1].strip())
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
        return _call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _by_template(
    completion: Completion, prompt: Sequence[int], tokenizer: Any, tools: Sequence[Any] | None
) -> Reply | None:
    """Take a completion apart as its tokenizer says; None if it is not written that way."""
    written = tokenizer.decode(completion.tokens)
    if isinstance(completion.stop, str):
        written = written.rpartition(completion.stop)[0]
    try:
        found = tokenizer.parse_response(written, prefix=tokenizer.decode(prompt), tools=tools)
        calls = [_call_of(each["function"]) for each in found.get("tool_calls") or ()]
    except (ValueError, TypeError, KeyError):
        return None
    if None in calls:
        return None
    thoughts = next((found[name] for name in _THOUGHTS if found.get(name)), "")
    text = str(found.get("content") or "").removesuffix(tokenizer.eos_token or "")
    return Reply(text, [call for call in calls if call is not None], thoughts)
