# ruff: noqa: RUF001  (some marks are written with wide bars)
"""Grammars of replies that have to call a tool, in the format that a model writes calls in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from treegen.errors import InputError
from treegen.prompts.grammar_termination import has_finite_value
from treegen.prompts.grammars import JSON_SPACE
from treegen.prompts.replies.formats import DEFAULT_FORMAT, ToolFormat
from treegen.prompts.thinking import template_text


@dataclass(frozen=True, slots=True)
class _CallSyntax:
    """The syntax of calls whose arguments are JSON."""

    call: tuple[str, str, str]
    """The text before the name, between name and arguments, and after these."""
    open: str = ""
    """Text before all calls."""
    close: str = ""
    """Text after all calls."""
    between: str | None = None
    """Text between two calls; None if only one call is possible."""
    mark: str = ""
    """Text that identifies this syntax of the format in a chat template."""
    is_json: bool = False
    """Whether the name is part of a JSON text."""


def _objects(
    open: str,
    close: str,
    between: str = ", ",
    mark: str = "",
    *,
    names: tuple[str, str] = ("name", "arguments"),
    around: tuple[str, str] = ("", ""),
) -> _CallSyntax:
    name, arguments = names
    call = (f'{around[0]}{{"{name}": "', f'", "{arguments}": ', f"}}{around[1]}")
    return _CallSyntax(call, open, close, between, mark, is_json=True)


_COHERE: Final = partial(_objects, between=",", names=("tool_name", "parameters"))
_KIMI: Final = (
    "<|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",  # calls are numbered, so only one is allowed
    "<|tool_call_end|>",
)
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_R1_CALL: Final = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
)
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

# For each format its syntaxes, the most specific one first.
_SYNTAXES: Final[Mapping[str, tuple[_CallSyntax, ...]]] = {
    "hermes": (_objects("", "", "\n", around=("<tool_call>\n", "\n</tool_call>")),),
    "llama": (_objects("", "", "; ", names=("name", "parameters")),),
    "nemotron": (_objects("<TOOLCALL>[", "]</TOOLCALL>"),),
    "minimax_m1": (_objects("<tool_calls>\n", "\n</tool_calls>", "\n"),),
    "granite": (_objects("<|tool_call|>[", "]"),),
    "hunyuan": (_objects("<tool_calls>[", "]</tool_calls>"),),
    "command_r": (
        _COHERE("<|START_ACTION|>[\n", "\n]<|END_ACTION|>", mark="<|START_ACTION|>"),
        _COHERE("Action: ```json\n[\n", "\n]\n```"),
    ),
    "mistral": (
        _CallSyntax(("[TOOL_CALLS]", "[ARGS]", ""), between="", mark="[ARGS]"),
        _objects("[TOOL_CALLS] [", "]"),
    ),
    "kimi_k2": (_CallSyntax(_KIMI, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    "deepseek": (
        _CallSyntax(_DEEPSEEK_R1_CALL, *_DEEPSEEK, between="\n", mark="```json"),
        _CallSyntax(_DEEPSEEK_CALL, *_DEEPSEEK, between=""),
    ),
}


def call_grammar(
    tokenizer: Any,
    form: ToolFormat | None,
    tools: Sequence[Any],
    *,
    name: str | None = None,
    is_single: bool = False,
) -> str:
    """Return the Lark grammar of a reply that consists of tool calls only.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        form: The format in which the model writes calls; None if it is not known.
        tools: The tools, in the form of chat templates.
        name: The tool to call; None for any.
        is_single: Whether exactly one call is allowed. Default: False.

    Raises:
        InputError: the format cannot be forced, there is no such tool, or its parameters have no
            finite value.
    """
    form = form or DEFAULT_FORMAT
    if form.name not in _SYNTAXES:
        raise InputError(
            f"forced tool calls are not supported with the format {form.name!r}; the supported "
            f'formats are {", ".join(_SYNTAXES)}. Set tool_choice to "auto", and request the call '
            "in a message"
        )
    template = template_text(tokenizer)
    call_syntax = next(syntax for syntax in _SYNTAXES[form.name] if syntax.mark in template)
    schemas = dict(map(_function, tools))
    if not schemas:
        raise InputError("a forced tool call requires tools; pass tools")
    if name is not None and name not in schemas:
        raise InputError(
            f"there is no tool {name!r:.80}; the available tools are {', '.join(schemas)}"
        )
    chosen = schemas if name is None else {name: schemas[name]}
    marks = _find_special_tokens(tokenizer, form)
    before, within, after = call_syntax.call
    lines = []
    for index, (tool_name, schema) in enumerate(chosen.items()):
        if not has_finite_value(schema):
            raise InputError(
                f"no finite text can call the tool {tool_name!r}, because a required argument "
                "contains itself; remove the argument from `required`"
            )
        escaped = (
            json.dumps(tool_name, ensure_ascii=False)[1:-1] if call_syntax.is_json else tool_name
        )
        head, tail = _literals(f"{before}{escaped}{within}", marks), _literals(after, marks)
        lines += [
            f"call_{index}: {head} arguments_{index} {tail}",
            f"arguments_{index}: %json {json.dumps(schema)}",
        ]
    more = ""
    if call_syntax.between is not None and name is None and not is_single:
        more = f" ({_literals(call_syntax.between, marks)} call)*"
    start = f"{_literals(call_syntax.open, marks)} call{more} {_literals(call_syntax.close, marks)}"
    calls = " | ".join(f"call_{index}" for index in range(len(chosen)))
    return "\n".join([f"start: {start}", f"call: {calls}", *lines])


def _function(tool: Any) -> tuple[str, Any]:
    """Return the name of a tool and the schema of its arguments."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InputError(f"a tool must have a function with a name, got {tool!r:.80}")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise InputError(
            f"the parameters of the tool {name!r:.80} must be a JSON schema, got {schema!r:.80}"
        )
    return name, {"type": "object", **schema, "x-guidance": JSON_SPACE}


def _find_special_tokens(tokenizer: Any, form: ToolFormat) -> dict[str, int]:
    """Return the special tokens that a format writes; text in a grammar cannot express them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    literals = (*form.literals, *form.inner)
    return {
        str(token): index
        for index, token in added.items()
        if getattr(token, "special", False) and any(str(token) in mark for mark in literals)
    }


def _literals(text: str, marks: Mapping[str, int]) -> str:
    """Return a text as Lark literals, with its special tokens by id."""
    longest = sorted(marks, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest))})", text) if longest else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in filter(None, parts)
    )
