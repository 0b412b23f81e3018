"""Tool calls in generated text."""

import copy
from dataclasses import replace

import pytest
from tiny_models import tiny_tokenizer

from treegen.outputs import Completion, Thinking
from treegen.prompts.calls import Reply, ToolCall, read_reply, tool_calls

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
CALL = ToolCall("add", {"a": 1, "b": [2]})


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", [CALL]),
        (f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", "I add.", [CALL, CALL]),
        (ADD.replace("arguments", "parameters"), "", [CALL]),
        (f"<|python_tag|>{ADD}", "", [CALL]),
        ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
        (f"The call is {ADD}", f"The call is {ADD}", []),
        ('{"name": 5, "arguments": {}}', '{"name": 5, "arguments": {}}', []),
        ("[" * 9_000, "[" * 9_000, []),
        (f"<tool_call> \n{ADD} ", "", [CALL]),
        # A search that went back over the spaces would take minutes.
        (f"<tool_call>x{' ' * 200_000}x", f"<tool_call>x{' ' * 200_000}x", []),
        ("", "", []),
    ],
)
def test_calls_are_found_and_the_rest_stays(text: str, rest: str, calls: list[ToolCall]) -> None:
    assert tool_calls(text) == (rest, calls)


def _said(text: str, stop: str | int | None = 1) -> Completion:
    tokens = tuple(tiny_tokenizer()(text)["input_ids"])
    shown = text.replace("</s>", "")
    return Completion("0", 0, 0, shown, tokens, (0.0,) * len(tokens), "stop", stop)


def test_thoughts_end_where_the_mark_says() -> None:
    tokenizer, call = tiny_tokenizer(), f"<tool_call>{ADD}</tool_call>"
    said = _said(f"<think>\nShall I {call}?\n</think>\n\nI add.{call}</s>")
    assert read_reply(said, [], tokenizer, ["add"]) == Reply("I add.", [CALL], f"Shall I {call}?")
    assert read_reply(said, [], tokenizer, None) == Reply(f"I add.{call}", [], f"Shall I {call}?")
    assert read_reply(_said(" a </s>"), [], tokenizer, ["add"]) == Reply(" a ", [])


def test_a_thinking_that_is_known_is_taken_off_whatever_its_tags() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "[THINK]{{ messages }}[/THINK]"
    thinking = "[THINK]\nHm, <tool_call>?\n[/THINK]"
    said = _said(f"{thinking}\n\nI add.<tool_call>{ADD}</tool_call>")
    said = replace(said, thinking=Thinking(9, len(thinking), is_closed=True))
    want = Reply("I add.", [CALL], "Hm, <tool_call>?")
    assert read_reply(said, [], tokenizer, ["add"]) == want
    assert read_reply(said, [], tokenizer, None) == Reply(said.answer, [], want.thoughts)
    open_end = replace(said, thinking=Thinking(99, len(said.text), is_closed=False))
    assert read_reply(open_end, [], tokenizer, ["add"]).text == ""


def test_a_tokenizer_says_how_its_model_writes() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant: ",
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open": "[CALL]", "close": "[/CALL]", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "</s>", "content": "text"},
        },
    }  # fmt: skip
    prompt = tokenizer("user: add\nassistant: ")["input_ids"]
    said = _said(f"[THINK]Hm.[/THINK]I add.[CALL]{ADD}[/CALL]</s>")
    assert read_reply(said, prompt, tokenizer, None) == Reply("I add.", [CALL], "Hm.")
    # What is not written that way stays text.
    torn = _said("I add.[CALL]{[/CALL]</s>")
    assert read_reply(torn, prompt, tokenizer, None) == Reply("I add.[CALL]{[/CALL]", [])
    stopped = _said("I add. STOP", stop="STOP")
    assert read_reply(stopped, prompt, tokenizer, None).text == "I add."
