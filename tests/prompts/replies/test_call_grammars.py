"""Grammars of forced calls: they have what chat templates write, and nothing that is no call."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_tokenizer
from tool_schemas import tool
from tool_texts import TOOLS, WRITERS, random_call

from treegen import InputError
from treegen.prompts.grammars import Grammar
from treegen.prompts.replies import ReplyReader
from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.call_grammars import _SYNTAXES, call_grammar
from treegen.prompts.replies.formats import TOOL_FORMATS
from treegen.prompts.replies.parser import ReplyParser
from treegen.prompts.replies.types import ToolCall

pytest.importorskip("llguidance")

# By the writer, what tells in a chat template that calls are written so.
TEMPLATES = {
    "hermes": "",
    "llama, bare": "",
    "nemotron": "",
    "minimax_m1": "",
    "granite": "",
    "hunyuan": "",
    "command_r": "<|START_ACTION|>",
    "command_r, 1": "Action:",
    "mistral": "[ARGS]",
    "mistral, list": "[TOOL_CALLS]",
    "kimi_k2": "",
    "deepseek": "",
    "deepseek, V3": "```json",
}
NAMES = ("search", "get_weather", "add2")


def _format(writer: str) -> Any:
    return TOOL_FORMATS[writer.partition(",")[0]]


KINDS = ("in pieces", "special", "added")


def _tokenizer(writer: str, kind: str) -> Any:
    """A tokenizer that has the marks of a format in pieces, or as tokens of a kind."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    form = _format(writer)
    marks = sorted({mark for mark in (*form.literals, *form.inner) if mark != "Action:"})
    if kind == "special":
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
    elif kind == "added":
        tokenizer.add_tokens(marks)
    tokenizer.chat_template = TEMPLATES[writer]
    return tokenizer


def _grammar(tokenizer: Any, text: str) -> Grammar:
    return Grammar(("grammar", text), tokenizer, [tokenizer.eos_token_id], len(tokenizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", list(TEMPLATES))
def test_what_templates_write_is_allowed(writer: str, kind: str) -> None:
    """And what they do not is not: another tool, a call too many, text before or after."""
    tokenizer, rng = _tokenizer(writer, kind), Random(writer)
    form, more = _format(writer), writer != "kimi_k2"
    every = _grammar(tokenizer, call_grammar(tokenizer, form, TOOLS))
    one = _grammar(tokenizer, call_grammar(tokenizer, form, TOOLS, is_single=True))
    named = _grammar(tokenizer, call_grammar(tokenizer, form, TOOLS, name="search"))

    def allows(grammar: Grammar, text: str) -> bool:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return bool(grammar.start().validate_tokens(ids) == len(ids))

    for _ in range(12):
        calls = [random_call(rng, names=NAMES) for _ in range(rng.randint(1, 3))]
        calls = [(name, _in_order(given)) for name, given in calls]
        text = WRITERS[writer](calls)
        assert allows(every, text) == (len(calls) == 1 or more), text
        assert allows(one, text) == (len(calls) == 1), text
        assert allows(named, text) == (len(calls) == 1 and calls[0][0] == "search"), text
        for wrong in (f"Well: {text}", f"{text} Done.", text[:-1], ""):
            assert not allows(every, wrong), wrong
        assert not allows(every, WRITERS[writer]([("fly", {})]))
        assert not allows(every, WRITERS[writer]([("search", {"count": "many"})]))


def _in_order(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments in the order of the schema, which is the one in which a grammar has them."""
    order = list(TOOLS[0]["function"]["parameters"]["properties"])
    return {name: given[name] for name in sorted(given, key=order.index)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", list(TEMPLATES))
def test_whatever_is_allowed_is_read_as_calls(writer: str, kind: str) -> None:
    """Walks through the grammar at random end in calls of known tools, and in nothing else."""
    tokenizer, rng = _tokenizer(writer, kind), Random(f"{writer}{kind}")
    properties = {"x": {"enum": [1, "two", None]}, "y": {"type": "boolean"}, "é": {"const": [1.5]}}
    tools = [tool(name, properties, additionalProperties=False) for name in NAMES]
    grammar = _grammar(tokenizer, call_grammar(tokenizer, _format(writer), tools))
    for _ in range(4):
        matcher, ids = grammar.start(), list[int]()
        while True:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = int(rng.choice(list(allowed)))
            if token == tokenizer.eos_token_id:
                assert matcher.is_accepting()  # a matcher that has failed allows the end too
                break
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts = ReplyParser(_format(writer), ToolSchemas(tools)).end(text)
        assert parts and all(isinstance(part, ToolCall) for part in parts), text
        for part in parts:
            assert isinstance(part, ToolCall)
            assert part.name in NAMES
            assert part.arguments.keys() <= {"x", "y", "é"}
            assert part.arguments.get("x", 1) in (1, "two", None)


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    tokenizer = tiny_tokenizer()
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    for name, form in TOOL_FORMATS.items():
        if name not in _SYNTAXES:
            with pytest.raises(InputError, match=f"'{name}'.*hermes"):
                call_grammar(tokenizer, form, TOOLS)
    for tools, message in (
        ([], "pass tools"),
        ([5], "a function with a name"),
        ([{"function": {"name": ""}}], "a function with a name"),
        ([{"function": {"name": "f", "parameters": [1]}}], "must be a JSON schema"),
        ([{"function": {"name": "f", "parameters": endless}}], "no finite text can call"),
    ):
        with pytest.raises(InputError, match=message):
            call_grammar(tokenizer, None, tools)
    with pytest.raises(InputError, match="no tool 'fly'; the available tools are search"):
        ReplyReader(tokenizer).call_grammar(TOOLS, "fly")
    text = ReplyReader(tokenizer).call_grammar([{"name": "now"}])
    assert json.loads(text.partition("%json ")[2])["properties"] == {}
