"""Converts Inspect's messages and tools for chat templates."""

from collections.abc import Sequence
from typing import Any

from inspect_ai.model import ChatMessage, ContentImage, ContentReasoning, ContentText
from inspect_ai.tool import ToolInfo

from treegen.errors import InputError
from treegen.prompts.tree import Message


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert the messages of a conversation.

    Raises:
        InputError: A message has content that is neither text nor an image.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> Message:
    converted: dict[str, Any] = {"role": message.role, "content": message.text}
    parts = [] if isinstance(message.content, str) else message.content
    for part in parts:
        if not isinstance(part, ContentText | ContentReasoning | ContentImage):
            raise InputError(
                f"a message has content of type {part.type}; leave out all but text and images"
            )
    if any(isinstance(part, ContentImage) for part in parts):
        converted["content"] = [
            {"type": "image", "image": part.image}
            if isinstance(part, ContentImage)
            else {"type": "text", "text": part.text}
            for part in parts
            if isinstance(part, ContentText | ContentImage)
        ]
    thoughts = [part.reasoning for part in parts if isinstance(part, ContentReasoning)]
    if thoughts:
        converted["reasoning_content"] = "\n".join(thoughts)
    if message.role == "assistant" and message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        if message.error is not None:
            converted["content"] = f"Error: {message.error.message}"
        converted |= {"name": message.function, "tool_call_id": message.tool_call_id}
    return converted


def template_tools(tools: Sequence[ToolInfo]) -> list[dict[str, Any]] | None:
    """Convert the tools of a conversation; return None if there are none."""
    return [
        {"type": "function", "function": tool.model_dump(exclude={"options"}, exclude_none=True)}
        for tool in tools
    ] or None
