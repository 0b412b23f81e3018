"""Readers of calls in formats with their own marks: Gemma, and the channels of Harmony."""

from __future__ import annotations

import re
from typing import Any, Final

from treegen.prompts.replies.arguments import ToolSchemas, from_json
from treegen.prompts.replies.readers import MAX_DEPTH, Read, make_call
from treegen.prompts.replies.scan import NotACall, Scan

# Gemma: call:name{key:value,...}, with marks instead of quotes


def gemma_calls(scan: Scan, tools: ToolSchemas, *, quote: str, end: str) -> Read:
    """Read one call up to the mark `end`.

    Args:
        scan: The position after the mark that opens the call.
        tools: Ignored.
        quote: The mark around strings.
        end: The mark that ends the call.
    """
    scan.space()
    scan.take("call:")
    name = scan.name()
    arguments = _gemma_value(scan, quote, 0)
    scan.close(end)
    return [make_call(name, arguments)]


def _gemma_value(scan: Scan, quote: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotACall("too deep")
    scan.space()
    if scan.skip(quote):
        text = scan.until(quote)
        scan.take(quote)
        return text
    if scan.skip("{"):
        found: dict[str, Any] = {}
        while not _ends(scan, "}"):
            key = _gemma_value(scan, quote, depth + 1) if scan.has(quote) else scan.until(":")
            scan.space()
            scan.take(":")
            found[str(key).strip()] = _gemma_value(scan, quote, depth + 1)
        return found
    if scan.skip("["):
        items = []
        while not _ends(scan, "]"):
            items.append(_gemma_value(scan, quote, depth + 1))
        return items
    text = scan.until(",", "}", "]").strip()
    if not text:
        raise NotACall("no value")
    return from_json(text)


def _ends(scan: Scan, end: str) -> bool:
    """Whether a container ends here; if not, skip the comma before the next member."""
    scan.space()
    scan.skip(",")
    scan.space()
    return scan.skip(end)


# Harmony

_MESSAGE: Final = "<|message|>"
HARMONY_ENDS: Final = ("<|call|>", "<|end|>", "<|return|>")
HARMONY_OPENS: Final = ("<|channel|>", "<|start|>")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_CHANNEL: Final = re.compile(r"(?:^|<\|channel\|>)\s*(\w+)")


def harmony(scan: Scan, tools: ToolSchemas, *, is_start: bool) -> Read:
    """Read a message: its header, and its arguments if it is addressed to a tool.

    Args:
        scan: The position after the mark that opens the header.
        tools: Ignored.
        is_start: Whether the header begins with the role.
    """
    header = scan.until(_MESSAGE)
    if len(header) > 500 or any(mark in header for mark in HARMONY_ENDS):
        raise NotACall("no header")
    scan.take(_MESSAGE)
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        text = header if not is_start else header[max(header.find("<|channel|>"), 0) :]
        channel = _CHANNEL.search(text)
        return "thoughts" if channel is not None and channel[1] == "analysis" else "text"
    scan.space()
    arguments = {} if scan.has(*HARMONY_ENDS) else scan.json()
    scan.space()
    if not scan.is_over() and not scan.has(*HARMONY_OPENS):
        if not scan.has(*HARMONY_ENDS):
            raise NotACall("more than an object for arguments")
        next(filter(scan.skip, HARMONY_ENDS))
    return [make_call(recipient[1].removeprefix("functions."), arguments)]
