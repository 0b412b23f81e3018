"""What a completion says: thoughts, text and tool calls, whole and while it grows."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from treegen.common.outputs import Completion, Thinking
from treegen.errors import ModelWarning
from treegen.prompts.replies import Part, ReasoningPart, Reply, ReplyReader, TextPart, ToolCall

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
CALL = ToolCall("add", {"a": 1, "b": [2]})
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def _said(text: str, stop: str | int | None = 1) -> Completion:
    tokens = tuple(tiny_tokenizer()(text)["input_ids"])
    shown = text.replace("</s>", "")
    return Completion("0", 0, 0, shown, tokens, (0.0,) * len(tokens), "stop", stop)


def hermes(template: str = "<tool_call>{{ tools }}") -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def read(said: Completion, tools: Sequence[Any] | None = TOOLS, tokenizer: Any = None) -> Reply:
    return ReplyReader(tokenizer or hermes()).read(said, [], tools)


def grown(
    replies: ReplyReader, said: Completion, tools: Sequence[Any] | None = TOOLS
) -> list[Part]:
    """The parts of a completion that comes a token at a time."""
    reply, parts, text = replies.start_stream([], tools), list[Part](), ""
    whole = reply.decode_completion(said)
    for num in range(1, len(said.tokens)):
        new = replies.text.of([], said.tokens[:num])
        if whole.startswith(new):
            parts += reply.add(new.removeprefix(text))
            text = new
    return parts + reply.end(whole.removeprefix(text), said)


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", [CALL]),
        (f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", "I add.", [CALL, CALL]),
        (ADD.replace("arguments", "parameters"), "", [CALL]),
        ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
        (f"The call is {ADD}", f"The call is {ADD}", []),
        ('{"name": 5, "arguments": {}}', '{"name": 5, "arguments": {}}', []),
        ("[" * 9_000, "[" * 9_000, []),
        (f"<tool_call> \n{ADD} ", "", [CALL]),
        # A search that went back over the spaces would take minutes.
        (f"<tool_call>x{' ' * 9_000}x", f"<tool_call>x{' ' * 9_000}x", []),
        (" a \n", " a \n", []),
        ("", "", []),
    ],
)
def test_calls_are_found_and_the_rest_stays(text: str, rest: str, calls: list[ToolCall]) -> None:
    assert read(_said(text, None)) == Reply(rest, calls)


def test_calls_are_found_only_where_there_are_tools() -> None:
    text = f"<tool_call>{ADD}</tool_call>"
    assert read(_said(text, None), None) == Reply(text, [])


def test_thoughts_end_where_the_mark_says() -> None:
    call = f"<tool_call>{ADD}</tool_call>"
    said = _said(f"<think>\nShall I {call}?\n</think>\n\nI add.{call}</s>")
    assert read(said) == Reply("I add.", [CALL], f"Shall I {call}?")
    assert read(said, None) == Reply(f"I add.{call}", [], f"Shall I {call}?")
    assert read(_said(f"Hm.\n</think>\n\nI add.{call}</s>")) == Reply("I add.", [CALL], "Hm.")
    assert read(_said(" a </s>")) == Reply(" a ", [])


def test_a_thinking_that_is_known_is_taken_off_whatever_its_tags() -> None:
    tokenizer = hermes("[THINK]{{ messages }}[/THINK]<tool_call>")
    thinking = "[THINK]\nHm, <tool_call>?\n[/THINK]"
    said = _said(f"{thinking}\n\nI add.<tool_call>{ADD}</tool_call>")
    num = len(tokenizer(thinking)["input_ids"])
    said = replace(said, thinking=Thinking(num, len(thinking), is_closed=True))
    want = Reply("I add.", [CALL], "Hm, <tool_call>?")
    assert read(said, TOOLS, tokenizer) == want
    assert read(said, None, tokenizer) == Reply(said.answer, [], want.thoughts)
    open_end = replace(said, thinking=Thinking(len(said.tokens), len(said.text), is_closed=False))
    assert read(open_end, TOOLS, tokenizer).text == ""


def test_tags_in_a_structure_are_text_in_streams_too() -> None:
    text = "<think>Hm.</think>4"
    said, replies = _said(text, None), ReplyReader(hermes())
    assert replies.read(said, is_structured=True) == Reply(text, [])
    reply = replies.start_stream([], None, is_structured=True)
    assert [*reply.add("<think>Hm.</th"), *reply.end("ink>4", said)] == [
        TextPart("<think>Hm.</th"),
        TextPart("ink>4"),
    ]


def test_parts_come_as_soon_as_they_are_known() -> None:
    said = _said(f"<think>\nHm.\n</think>\n\nI add < 3.\n<tool_call>{ADD}</tool_call>\nThen</s>")
    parts = grown(ReplyReader(hermes()), said)
    assert [part for part in parts if isinstance(part, ToolCall)] == [CALL]
    before = parts[: parts.index(CALL)]
    assert "".join(part.text for part in before if isinstance(part, ReasoningPart)) == "Hm."
    assert "".join(part.text for part in before if isinstance(part, TextPart)) == "I add < 3."
    assert len(before) > 6
    whole = read(said)
    assert whole == Reply("I add < 3.\n\nThen", [CALL], "Hm.")


def test_a_prompt_may_have_opened_the_thinking() -> None:
    tokenizer = hermes()
    prompt, said = tokenizer("add\n<think>\n")["input_ids"], _said("Hm.\n</think>\nI add.</s>")
    want = Reply("I add.", [], "Hm.")
    replies = ReplyReader(tokenizer)
    assert replies.read(said, prompt, TOOLS) == want
    parts = replies.start_stream(prompt, TOOLS).end("Hm.\n</think>\nI add.", said)
    assert parts == [ReasoningPart("Hm."), TextPart("I add.")]


def test_marks_that_are_special_tokens_are_seen() -> None:
    tokenizer = hermes("<|channel|><|message|>")
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks, "<|secret|>"]})
    text = (
        "<|channel|>analysis<|message|>Hm.<|secret|><|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": [2]}<|call|>'
    )
    tokens = tuple(tokenizer(text)["input_ids"])
    stop = tokenizer.convert_tokens_to_ids("<|call|>")
    said = Completion("0", 0, 0, "", tokens, (0.0,) * len(tokens), "stop", stop)
    replies, want = ReplyReader(tokenizer), Reply("I add.", [CALL], "Hm.")
    assert replies.read(said, [], TOOLS) == want
    assert replies.read(replace(said, tokens=tokens[:-1], stop=None), [], TOOLS) == want
    assert grown(replies, said)[-1] == CALL
    # Without tools too, its channels are told apart.
    assert replies.read(said, [], None).thoughts == "Hm."


@pytest.mark.parametrize(("end", "calls"), [("<|call|>", [ToolCall("add", {})]), ("", [])])
def test_a_call_without_arguments_is_one_if_it_was_ended(end: str, calls: list[ToolCall]) -> None:
    tokenizer = hermes("<|channel|><|message|>")
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    text = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    tokens = tuple(tokenizer(text + end)["input_ids"])
    stop = tokenizer.convert_tokens_to_ids(end) if end else None
    said = Completion("0", 0, 0, "", tokens, (0.0,) * len(tokens), "stop", stop)
    said = said if end else replace(said, finish_reason="length")
    replies = ReplyReader(tokenizer)
    assert replies.read(said, [], TOOLS) == Reply("" if end else text, calls)
    found = [part for part in grown(replies, said) if isinstance(part, ToolCall)]
    assert found == calls


def test_the_format_can_be_named() -> None:
    text = "[add(a=1, b=[2])]"
    assert read(_said(text, None)).text == text
    found = ReplyReader(hermes(), "pythonic").read(_said(text, None), [], TOOLS)
    assert found == Reply("", [CALL])


def test_a_model_whose_format_is_not_known_gets_one_warning() -> None:
    replies = ReplyReader(hermes("{{ tools }}"))
    with pytest.warns(ModelWarning, match="tool-call format.*--tool-format"):
        assert replies.read(_said(ADD, None), [], TOOLS) == Reply("", [CALL])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replies.read(_said(ADD, None), [], TOOLS)
        ReplyReader(hermes("{{ tools }}")).read(_said(ADD, None), [], None)


def test_a_tokenizer_says_how_its_model_writes() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant: ",
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open": "[CALL]",
                "close": "[/CALL]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "</s>", "content": "text"},
        },
    }
    prompt = tokenizer("user: add\nassistant: ")["input_ids"]
    replies = ReplyReader(tokenizer)
    said = _said(f"[THINK]Hm.[/THINK]I add.[CALL]{ADD}[/CALL]</s>")
    assert replies.read(said, prompt, None) == Reply("I add.", [CALL], "Hm.")
    parts = replies.start_stream(prompt, TOOLS).end("", said)
    assert parts == [ReasoningPart("Hm."), TextPart("I add."), CALL]
    # What is not written that way stays text.
    torn = _said("I add.[CALL]{[/CALL]</s>")
    assert replies.read(torn, prompt, None) == Reply("I add.[CALL]{[/CALL]", [])
    stopped = _said("I add. STOP", stop="STOP")
    assert replies.read(stopped, prompt, None).text == "I add."
    # A format that is named goes first.
    by_name = ReplyReader(tokenizer, "hermes").read(_said(ADD, None), prompt, TOOLS)
    assert by_name == Reply("", [CALL])
