# ruff: noqa: RUF001  (some marks are written with wide bars)
"""The table of tool call formats, and the marks by which a model's format is recognized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from treegen.common.checks import check_argument_types
from treegen.errors import InputError, arg
from treegen.prompts.replies import readers
from treegen.prompts.replies.arguments import ToolSchemas, from_json
from treegen.prompts.replies.readers import MAX_DEPTH, Read, Reader, TaggedCallReader, make_call
from treegen.prompts.replies.scan import NotACall, Scan
from treegen.prompts.thinking import template_text

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
        fields: dict[str, Any] = {}
        while not _ends(scan, "}"):
            key = _gemma_value(scan, quote, depth + 1) if scan.has(quote) else scan.until(":")
            scan.space()
            scan.take(":")
            fields[str(key).strip()] = _gemma_value(scan, quote, depth + 1)
        return fields
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


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model writes tool calls."""

    name: str
    """Its name."""
    marks: tuple[tuple[str, ...], ...]
    """Groups of marks; a chat template that contains all marks of one group identifies the
    format."""
    blocks: Mapping[str, Reader] = field(default_factory=dict)
    """The reader of a block of calls, by the mark that opens the block."""
    begins: tuple[tuple[str, Reader], ...] = ()
    """Possible starts of a text that consists only of calls, each with its reader."""
    dropped: tuple[str, ...] = ()
    """Marks that are not text."""
    inner: tuple[str, ...] = ()
    """Marks within a block."""
    has_channels: bool = False
    """Whether the format's own marks separate thoughts from text."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All marks to search for in a text."""
        return (*self.blocks, *self.dropped)


_LLAMA_JSON: Final = partial(readers.json_calls, strict=True)
_BARE_JSON: Final[tuple[tuple[str, Reader], ...]] = (("{", _LLAMA_JSON), ("[", _LLAMA_JSON))
_QWEN: Final = TaggedCallReader(
    call=("<function=", ">"),
    call_end="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    trims=True,
)
_GLM: Final = TaggedCallReader(
    call=("", ""),
    call_end="</tool_call>",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
_MINIMAX: Final = TaggedCallReader(
    call=('<invoke name="', '">'),
    call_end="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    end="</minimax:tool_call>",
)


def _dsml(wrapper: str) -> TaggedCallReader:
    return TaggedCallReader(
        call=('<｜DSML｜invoke name="', '">'),
        call_end="</｜DSML｜invoke>",
        key=('<｜DSML｜parameter name="', '"'),
        value=("", "</｜DSML｜parameter>"),
        end=f"</｜DSML｜{wrapper}>",
        typed={' string="true">': False, ' string="false">': True},
    )


def _hy(suffix: str) -> TaggedCallReader:
    """Return the reader of Hunyuan's calls between tags, whose tag names may have a suffix."""
    return TaggedCallReader(
        call=(f"<tool_call{suffix}>", ""),
        after_name=f"<tool_sep{suffix}>",
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value=(f"<arg_value{suffix}>", f"</arg_value{suffix}>"),
        call_end=f"</tool_call{suffix}>",
        end=f"</tool_calls{suffix}>",
    )


def _json_format(name: str, open: str, close: str, mark: str = "", **more: Any) -> ToolFormat:
    """Return a format of JSON between two texts; `mark` or else `open` identifies it."""
    reader = partial(readers.json_calls, end=close)
    return ToolFormat(name, ((mark or open,),), {open: reader}, **more)


def _gemma(quote: str, end: str) -> Reader:
    return partial(gemma_calls, quote=quote, end=end)


_FORMATS: Final = (
    ToolFormat(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        {
            "<|channel|>": partial(harmony, is_start=False),
            "<|start|>": partial(harmony, is_start=True),
        },
        dropped=HARMONY_ENDS,
        inner=("<|message|>", "<|constrain|>"),
        has_channels=True,
    ),
    ToolFormat(
        "seed_oss",
        (("<seed:tool_call>",),),
        {"<seed:tool_call>": readers.make_closed_reader(_QWEN, "</seed:tool_call>")},
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        {
            "<tool_call>": readers.make_closed_reader(_QWEN, "</tool_call>"),
            # Models sometimes forget the tag around a call.
            "<function=": lambda scan, tools: _QWEN(_step_back(scan, "<function="), tools),
        },
    ),
    ToolFormat(
        "hy",
        (("<tool_sep>", "<arg_key>"), ("<tool_call:opensource>",)),
        {"<tool_calls>": _hy(""), "<tool_calls:opensource>": _hy(":opensource")},
    ),
    ToolFormat("glm", (("<arg_key>",),), {"<tool_call>": _GLM}),
    ToolFormat("minimax_m2", (("<minimax:tool_call>",),), {"<minimax:tool_call>": _MINIMAX}),
    ToolFormat(
        "deepseek_dsml",
        (("｜DSML｜",),),
        {f"<｜DSML｜{name}>": _dsml(name) for name in ("function_calls", "tool_calls")},
        inner=("｜DSML｜",),
    ),
    ToolFormat(
        "deepseek",
        (("<｜tool▁calls▁begin｜>",),),
        {"<｜tool▁calls▁begin｜>": readers.deepseek_calls},
        inner=(
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    ToolFormat(
        "kimi_k2",
        (("<|tool_call_begin|>",),),
        {"<|tool_calls_section_begin|>": readers.kimi_calls},
        inner=(
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        {"[TOOL_CALLS]": readers.mistral_calls},
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    ToolFormat(
        "command_r",
        (("<|START_ACTION|>",), ("Action:", "tool_name", "directly_answer")),
        {
            "<|START_ACTION|>": partial(readers.json_calls, end="<|END_ACTION|>"),
            "Action:": readers.fenced_calls,
        },
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        inner=("<|END_ACTION|>",),
    ),
    ToolFormat(
        "gemma",
        (("<start_function_call>",), ("<|tool_call>", "<tool_call|>")),
        {
            "<start_function_call>": _gemma("<escape>", "<end_function_call>"),
            "<|tool_call>": _gemma('<|"|>', "<tool_call|>"),
        },
        inner=("<escape>", "<end_function_call>", '<|"|>', "<tool_call|>"),
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>",),),
        {"<|tool_call_start|>": partial(readers.python_calls, ends=("<|tool_call_end|>",))},
        inner=("<|tool_call_end|>",),
    ),
    ToolFormat(
        "olmo3",
        (("<function_calls>",),),
        {"<function_calls>": partial(readers.python_calls, ends=("</function_calls>",))},
    ),
    _json_format("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _json_format(
        "hunyuan",
        "<tool_calls>",
        "</tool_calls>",
        "<tool_calls>[",
        dropped=("<answer>\n", "\n</answer>", "<answer>", "</answer>"),
    ),
    _json_format("minimax_m1", "<tool_calls>", "</tool_calls>"),
    _json_format("granite", "<|tool_call|>", ""),
    _json_format(
        "hermes", "<tool_call>", "</tool_call>", begins=_BARE_JSON, inner=("</tool_call>",)
    ),
    ToolFormat(
        "llama",
        (("<|python_tag|>",), ("<|python_start|>",)),
        {
            "<|python_tag|>": readers.json_calls,
            "<|python_start|>": partial(readers.python_calls, ends=("<|python_end|>",)),
        },
        (*_BARE_JSON, ("[", readers.python_calls)),
        inner=("<|python_end|>",),
    ),
    ToolFormat("pythonic", (), {}, (("[", readers.python_calls),)),
)

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {form.name: form for form in _FORMATS}
"""Formats of tool calls, by name. A model has the first format whose marks it contains."""

NO_TOOLS: Final = ToolFormat("none", ())
DEFAULT_FORMAT: Final = TOOL_FORMATS["hermes"]
"""The format for a model whose own format is not known."""


def _step_back(scan: Scan, literal: str) -> Scan:
    scan.at -= len(literal)
    return scan


@check_argument_types
def tool_format(name: str) -> ToolFormat:
    """Return the format with a name.

    Raises:
        InputError: there is none.
    """
    if name not in TOOL_FORMATS:
        raise InputError(
            f"{arg('tool_format')} must be one of {', '.join(TOOL_FORMATS)}, got {name!r}"
        )
    return TOOL_FORMATS[name]


def tool_format_of(tokenizer: Any) -> ToolFormat | None:
    """Return the format that identifies itself in a tokenizer's chat template or tokens.

    Returns None if there is none.
    """
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    for text in (template_text(tokenizer), "\n".join(added)):
        for form in _FORMATS:
            if any(all(mark in text for mark in group) for group in form.marks):
                return form
    return None
