# ruff: noqa: RUF001  (some marks are written with wide bars)
"""The table of tool formats: what is written is read, however a text is cut into pieces."""

from random import Random
from typing import Any

import pytest
from tool_texts import ONE, TOOLS, WHOLE, WORDS, WRITERS, Call, random_call

from treegen.errors import InputError
from treegen.prompts.replies import (
    TOOL_FORMATS,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    tool_format_of,
)
from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.formats import tool_format
from treegen.prompts.replies.parser import ReplyParser
from treegen.prompts.thinking import KNOWN


def parser_of(writer: str, **how: Any) -> ReplyParser:
    return ReplyParser(tool_format(writer.partition(",")[0]), ToolSchemas(TOOLS), KNOWN[0], **how)


def joined(parts: list[Part]) -> tuple[str, str, list[Call]]:
    """The thoughts, the text and the calls of some parts."""
    return (
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        "".join(part.text for part in parts if isinstance(part, TextPart)),
        [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)],
    )


def in_pieces(parser: ReplyParser, text: str, rng: Random) -> list[Part]:
    parts, at = [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 7, 30))
        parts += parser.add(text[at : at + size])
        at += size
    return parts + parser.end()


def test_every_format_has_a_writer() -> None:
    assert {writer.partition(",")[0] for writer in WRITERS} == set(TOOL_FORMATS)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_is_read_whole_and_in_pieces(writer: str) -> None:
    rng = Random(f"{writer}")
    for _ in range(25):
        calls = [random_call(rng) for _ in range(1 if writer in ONE else rng.randrange(1, 4))]
        said = "" if writer in WHOLE else rng.choice(["", "I look.", "One < two.\n\nThree"])
        thoughts = rng.choice(["", "Hm, <tool_call>? [1] {x}"])
        text = f"{said}\n\n{WRITERS[writer](calls)}" if said else WRITERS[writer](calls)
        if writer == "harmony":
            begun = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant"
            text = begun * bool(thoughts) + WRITERS[writer](calls)
            said = ""
        elif thoughts:
            text = f"<think>\n{thoughts}\n</think>\n\n{text}"
        want = (thoughts, said, calls)
        assert joined(parser_of(writer).end(text)) == want, text
        assert joined(in_pieces(parser_of(writer), text, rng)) == want, text


@pytest.mark.parametrize("writer", WRITERS)
def test_a_corrupt_text_is_the_same_in_any_pieces_and_loses_no_text(writer: str) -> None:
    """Cut, doubled and mangled texts; whatever is no call stays text."""
    rng = Random(f"corrupt {writer}")
    for _ in range(50):
        text = WRITERS[writer]([random_call(rng) for _ in range(rng.randrange(1, 3))])
        for _ in range(rng.randrange(1, 4)):
            at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            piece = rng.choice([text[at:to][:20], rng.choice(WORDS), "", "<", "}", "\n"])
            text = text[:at] + piece + text[rng.choice((at, min(at + 5, to), to)) :]
        whole = parser_of(writer).end(text)
        assert joined(in_pieces(parser_of(writer), text, rng)) == joined(whole), text
        if not any(isinstance(part, ToolCall) for part in whole) and writer != "harmony":
            said = "".join(part.text for part in whole if not isinstance(part, ToolCall))
            form = tool_format(writer.partition(",")[0])
            for mark in (*form.dropped, "Action:"):
                text, said = text.replace(mark, ""), said.replace(mark, "")
            assert said.split() == text.split()


@pytest.mark.parametrize("writer", ["qwen3_coder", "glm", "minimax_m2", "deepseek_dsml"])
def test_text_that_looks_like_the_end_of_an_argument_is_part_of_it(writer: str) -> None:
    hard = "a </parameter> b </arg_value> c </tool_call> <tool_call> d </｜DSML｜parameter>."
    call = ("search", {"text": hard, "where": "</function>"})
    assert joined(parser_of(writer).end(WRITERS[writer]([call])))[2] == [call]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_arguments_that_json_cannot_write_are_no_call(number: str) -> None:
    for writer in ("hermes", "llama", "mistral", "deepseek", "deepseek_dsml"):
        text = WRITERS[writer]([("search", {"count": 7.5})])
        assert joined(parser_of(writer).end(text))[2] == [("search", {"count": 7.5})]
        assert joined(parser_of(writer).end(text.replace("7.5", number)))[2] == []


def test_a_mark_in_a_string_ends_no_call() -> None:
    call = ("search", {"text": '</tool_call> "<tool_call>" [TOOL_CALLS] }'})
    for writer in ("hermes", "mistral", "mistral, list", "kimi_k2", "deepseek"):
        assert joined(parser_of(writer).end(WRITERS[writer]([call])))[2] == [call]


@pytest.mark.parametrize(
    ("written", "want"),
    [
        ("12", {"text": "12", "count": 12, "ratio": 12, "items": "12", "other": 12}),
        ("true", {"text": "true", "exact": True, "count": "true", "other": True}),
        ("True", {"exact": True, "text": "True", "other": True}),
        ("None", {"text": "None", "other": None}),
        ("null", {"text": "null", "count": "null", "other": None}),
        ("[1, 'a']", {"items": [1, "a"], "text": "[1, 'a']", "other": "[1, 'a']"}),
        ("1e400", {"ratio": "1e400", "other": "1e400"}),
        ("1_000", {"count": "1_000", "other": "1_000"}),
        ("NaN", {"ratio": "NaN", "other": "NaN"}),
        ("9" * 5_000, {"count": "9" * 5_000}),
    ],
)
def test_arguments_between_tags_have_the_types_that_are_declared(
    written: str, want: dict[str, Any]
) -> None:
    tools = ToolSchemas(TOOLS)
    for name, value in want.items():
        found = tools.parse_argument("search", name, written)
        assert (found, type(found)) == (value, type(value))
    either = ToolSchemas(
        [
            {
                "name": "f",
                "parameters": {
                    "properties": {
                        "x": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/no"}]},
                        "y": {"enum": ["1", "2"]},
                    },
                    "$defs": {"no": {"type": "null"}},
                },
            }
        ]
    )
    assert (
        either.parse_argument("f", "x", "null") is None
        and either.parse_argument("f", "x", "7") == 7
    )
    assert either.parse_argument("f", "y", "1") == "1"


@pytest.mark.parametrize(
    ("marks", "name"),
    [
        ("<tool_call>{'name'", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<tool_call>f<arg_key>", "glm"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_call>call:<tool_call|>", "gemma"),
        ("<|START_ACTION|>", "command_r"),
        ("<|python_tag|>", "llama"),
        ("<seed:tool_call><function=x><parameter=y>", "seed_oss"),
        ("tools", None),
        ('<tool_calls>[{"name": "func_name1", "arguments": {}},...]</tool_calls>', "hunyuan"),
        ("<tool_calls>{'name'", "minimax_m1"),
        ("<tool_call>f<tool_sep><arg_key>", "hy"),
        ("<tool_calls:opensource><tool_call:opensource>f<arg_key:opensource>", "hy"),
    ],
)
def test_a_format_is_found_by_the_chat_template_or_the_tokens(marks: str, name: str | None) -> None:
    class Tokenizer:
        chat_template: Any = None

        def get_added_vocab(self) -> dict[str, int]:
            return self.added

        added: dict[str, int] = {}  # noqa: RUF012

    by_template, by_tokens = Tokenizer(), Tokenizer()
    by_template.chat_template = {"default": "{{ messages }}", "tool_use": f"{{{{ tools }}}}{marks}"}
    by_tokens.added = {marks: 7}
    for tokenizer in (by_template, by_tokens):
        found = tool_format_of(tokenizer)
        assert (found and found.name) == name


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"tool_format must be one of harmony, .*got 'xml'"):
        tool_format("xml")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_hostile_text_takes_no_time(writer: str) -> None:
    opening = WRITERS[writer]([("f", {"text": "x"})])[:40]
    for filler in ("[" * 20_000, "{" * 20_000, " " * 100_000, opening * 300, "<" * 50_000):
        parser_of(writer).end(opening + filler)


def test_a_long_call_in_small_pieces_is_read_in_time() -> None:
    call = ("search", {"text": "x" * 20_000 + "\n" * 100})
    for writer in ("hermes", "qwen3_coder", "glm", "pythonic", "gemma"):
        parser, text = parser_of(writer), WRITERS[writer]([call])
        parts: list[Part] = []
        for at in range(0, len(text), 8):
            parts += parser.add(text[at : at + 8])
        assert joined(parts + parser.end())[2] == [call]


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_an_answer_of_hunyuan_is_what_stands_between_its_tags(size: int) -> None:
    call = ("search", {"text": "x"})
    written = WRITERS["hunyuan"]([call])
    for text, want in (
        ("<think>\nHm.\n</think>\n<answer>\nIt is 4.\n</answer>", ("Hm.", "It is 4.", [])),
        (f"<think>\n\n</think>\n<answer>\n{written}\n</answer>", ("", "", [call])),
    ):
        parser = parser_of("hunyuan")
        parts = [p for at in range(0, len(text), size) for p in parser.add(text[at : at + size])]
        thoughts, said, calls = joined(parts + parser.end())
        assert (thoughts, said, calls) == want


def test_declared_types_are_found_at_any_depth_and_in_schemas_that_contain_themselves() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        deep = {"anyOf": [deep]}
    wide = {"anyOf": [{"$ref": "#/$defs/wide"}] * 1_000 + [{"type": "integer"}]}
    parameters = {"properties": {"deep": deep, "wide": wide}, "$defs": {"wide": wide}}
    tools = ToolSchemas([{"name": "f", "parameters": parameters}])
    for name in ("deep", "wide"):
        assert tools.parse_argument("f", name, "7") == 7
        assert tools.parse_argument("f", name, "true") == "true"
