# ruff: noqa: RUF001  (some marks are written with wide bars)
"""Readers of calls that are written as JSON, between tags, or in Python.

A reader gets the position after the mark that opens a block of calls, and returns the block's
calls. It raises NotACall if the block has anything other than complete calls.
"""

from __future__ import annotations

import ast
import random
import re
import string
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from treegen.prompts.replies.arguments import ToolSchemas, plain_value
from treegen.prompts.replies.scan import JSON, NotACall, Scan
from treegen.prompts.replies.types import ToolCall

Channel = Literal["text", "thoughts"]
Read = list[ToolCall] | Channel
"""Contents of a block: its calls, or the channel of the text after its header."""
Reader = Callable[[Scan, ToolSchemas], Read]

_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")
_IDS: Final = ("id", "tool_call_id")
MAX_DEPTH: Final = 100


def make_call(
    name: Any, arguments: Any, id: Any = None, new_id: Callable[[], str] | None = None
) -> ToolCall:
    """Return a call.

    Args:
        name: The name of the function.
        arguments: A dict of arguments, or its JSON text.
        id: The call's id, if it has one.
        new_id: Makes an id if there is none; None leaves that to `ToolCall`.

    Raises:
        NotACall: the name is not text, or the arguments are not an object.
    """
    if isinstance(arguments, str):
        scan = Scan(arguments, 0, ended=True)
        arguments = scan.json()
        scan.space()
        if not scan.is_over():
            raise NotACall("more than an object for arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NotACall("no name or no arguments")
    if not isinstance(id, str) or not id:
        id = new_id() if new_id else None
    identity = {"id": id} if id else {}
    return ToolCall(name, arguments, **identity)


# JSON


def json_calls(
    scan: Scan,
    tools: ToolSchemas,
    *,
    end: str = "",
    strict: bool = False,
    new_id: Callable[[], str] | None = None,
) -> Read:
    """Read JSON objects with a name and arguments, or lists of them, up to the mark `end`.

    Args:
        scan: The position where the calls start.
        tools: Ignored.
        end: The mark after the calls; "" for none.
        strict: Whether the text may contain nothing but calls, each with arguments.
        new_id: Makes ids of calls without one.
    """
    calls: list[ToolCall] = []
    while True:
        value = scan.json()
        items = value if isinstance(value, list) else [value]
        calls += [_json_call(item, strict, new_id) for item in items]
        scan.space()
        if scan.at < len(scan.text) and scan.text[scan.at] == ";":
            scan.at += 1
            scan.space()
        if scan.at < len(scan.text) and scan.text[scan.at] in "{[":
            continue
        if end:
            scan.close(end)
        elif not scan.is_over() and strict:
            raise NotACall("text after the calls")
        break
    if not calls:
        raise NotACall("an empty list")
    return calls


def _json_call(value: Any, strict: bool, new_id: Callable[[], str] | None) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    if not isinstance(value, dict):
        raise NotACall("no object")
    name, arguments, id = (
        next((value[key] for key in keys if key in value), None)
        for keys in (_NAMES, _ARGUMENTS, _IDS)
    )
    if arguments is None:
        if strict:
            raise NotACall("no arguments")
        arguments = {}
    return make_call(name, arguments, id, new_id)


def mistral_calls(scan: Scan, tools: ToolSchemas) -> Read:
    """Read a JSON list, or name[CALL_ID]id[ARGS]{...}, in which both marks are optional."""
    scan.space()
    if scan.is_over() or scan.text[scan.at] in "{[":
        return json_calls(scan, tools, new_id=mistral_id)
    name, id = scan.name(), None
    if scan.skip("[CALL_ID]"):
        id = scan.name()
    scan.skip("[ARGS]")
    return [make_call(name, scan.json(), id, mistral_id)]


def _members(read: Callable[[Scan, ToolSchemas], ToolCall], end: str) -> Reader:
    """Return a reader of consecutive calls, up to the mark `end`."""

    def reader(scan: Scan, tools: ToolSchemas) -> Read:
        calls = [read(scan, tools)]
        while True:
            scan.space()
            if scan.is_over() or scan.has(end):
                break
            calls.append(read(scan, tools))
        scan.close(end)
        return calls

    return reader


def _deepseek_call(scan: Scan, tools: ToolSchemas) -> ToolCall:
    scan.space()
    scan.take("<｜tool▁call▁begin｜>")
    name = scan.until("<｜tool▁sep｜>").strip()
    scan.take("<｜tool▁sep｜>")
    scan.space()
    if scan.has("{"):  # V3.1 on
        arguments = scan.json()
    else:
        name = scan.name()
        scan.space()
        scan.take("```json")
        arguments = scan.json()
        scan.space()
        scan.take("```")
    scan.close("<｜tool▁call▁end｜>")
    return make_call(name, arguments)


deepseek_calls: Final = _members(_deepseek_call, "<｜tool▁calls▁end｜>")

_KIMI_NAME: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def _kimi_call(scan: Scan, tools: ToolSchemas) -> ToolCall:
    scan.space()
    scan.take("<|tool_call_begin|>")
    id = scan.until("<|tool_call_argument_begin|>").strip()
    scan.take("<|tool_call_argument_begin|>")
    match = _KIMI_NAME.fullmatch(id)
    if match is None:
        raise NotACall("no name")
    arguments = scan.json()
    scan.close("<|tool_call_end|>")
    return make_call(match[1], arguments, id)


kimi_calls: Final = _members(_kimi_call, "<|tool_calls_section_end|>")


def fenced_calls(scan: Scan, tools: ToolSchemas) -> Read:
    """Read JSON in a fence, of the first Command R; its directly_answer is not a call."""
    scan.space()
    scan.take("```json")
    calls = json_calls(scan, tools, end="```")
    return [call for call in calls if isinstance(call, ToolCall) and call.name != "directly_answer"]


# Between tags


@dataclass(frozen=True, slots=True)
class TaggedCallReader:
    """Reads calls whose arguments are written between tags, each as text."""

    call: tuple[str, str]
    """The text before and after the name of a function."""
    call_end: str
    """The text after its arguments."""
    key: tuple[str, str]
    """The text before and after the name of an argument."""
    value: tuple[str, str]
    """The text before and after the value of an argument."""
    end: str = ""
    """The mark after all calls; empty if the last call ends them."""
    trims: bool = False
    """Whether a line break after the opening and before the closing tag of an argument is
    dropped."""
    typed: Mapping[str, bool] | None = None
    """Texts that may follow the name of an argument, and whether the argument is then JSON."""
    after_name: str = ""
    """Text that may follow the name of a function."""

    def __call__(self, scan: Scan, tools: ToolSchemas) -> Read:
        """Read calls up to the end."""
        calls = []
        while True:
            scan.space()
            calls.append(self._call(scan, tools))
            if not self.end:
                return calls
            scan.space()
            if scan.is_over() or not scan.has(self.call[0]):
                scan.close(self.end)
                return calls

    def _call(self, scan: Scan, tools: ToolSchemas) -> ToolCall:
        scan.take(self.call[0])
        name = scan.name()
        scan.space()
        scan.take(self.call[1])
        if self.after_name:
            scan.skip(self.after_name)
        arguments: dict[str, Any] = {}
        while True:
            scan.space()
            if not scan.has(self.key[0]):
                break
            scan.take(self.key[0])
            key = scan.until(self.key[1])
            scan.take(self.key[1])
            is_json = self._is_json(scan)
            if self.value[0]:
                scan.space()
                scan.take(self.value[0])
            text = self._text(scan)
            arguments[key.strip()] = _parse_value(tools, name, key.strip(), text, is_json)
        scan.take(self.call_end)
        return make_call(name, arguments)

    def _is_json(self, scan: Scan) -> bool | None:
        for literal, is_json in (self.typed or {}).items():
            if scan.skip(literal):
                return is_json
        return None

    def _text(self, scan: Scan) -> str:
        """Read an argument's text. An end tag counts only if the next key or the end follows it."""
        end, start = self.value[1], scan.at
        while True:
            scan.until(end)
            stop = scan.at
            scan.take(end)
            scan.space()
            if scan.has(self.key[0], self.call_end):
                break
        text = scan.text[start:stop]
        if self.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        return text


def _parse_value(tools: ToolSchemas, name: str, key: str, text: str, is_json: bool | None) -> Any:
    if is_json is None:
        return tools.parse_argument(name, key, text)
    if not is_json:
        return text
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError):
        raise NotACall("no JSON") from None


def make_closed_reader(reader: Reader, end: str) -> Reader:
    """Return a reader that also reads the mark `end` after the block."""

    def read(scan: Scan, tools: ToolSchemas) -> Read:
        contents = reader(scan, tools)
        scan.close(end)
        return contents

    return read


# In Python

_PYTHON_LIST: Final = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")


def python_calls(scan: Scan, tools: ToolSchemas, *, ends: tuple[str, ...] = ()) -> Read:
    """Read calls of Python functions with literal keyword arguments, up to one of some marks.

    The calls are a list, or one per line. Without marks they must be a list and the whole text.

    Args:
        scan: The position where the calls start.
        tools: Ignored.
        ends: The marks that may end the calls.
    """
    if ends:
        text = scan.until_any(*ends)
        if not scan.is_over():
            next(filter(scan.skip, ends))
    else:
        begun = _PYTHON_LIST.match(scan.text, scan.at)
        if begun is None and (scan.ended or len(scan.text) - scan.at > MAX_DEPTH):
            raise NotACall("no list of calls")
        text = scan.until_any("\0")
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escape sequences
            body = ast.parse(text.strip()).body
        expressions = [node.value for node in body if isinstance(node, ast.Expr)]
        if len(expressions) < len(body):
            raise NotACall("a statement")
        if len(expressions) == 1 and isinstance(expressions[0], ast.List):
            expressions = expressions[0].elts
        calls = [_python_call(node) for node in expressions]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from None
    if not calls:
        raise NotACall("an empty list")
    return calls


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall("no call by names")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NotACall("no name for an argument")
        arguments[keyword.arg] = plain_value(keyword.value)
    return make_call(ast.unparse(node.func), arguments)


# Ids


def mistral_id() -> str:
    """Return an id of the form that Mistral's chat templates require: nine letters and digits."""
    return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))
