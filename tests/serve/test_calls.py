"""Tool calls in generated text."""

import pytest

from treegen.serve.calls import ToolCall, tool_calls

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
        ("", "", []),
    ],
)
def test_calls_are_found_and_the_rest_stays(text: str, rest: str, calls: list[ToolCall]) -> None:
    assert tool_calls(text) == (rest, calls)
