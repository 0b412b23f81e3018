"""Results of tools as chat templates show them: the exact text that they add to the chat."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from agent_cases import TEMPLATE, TOOLS, chat_tokenizer

from treegen.common.outputs import Completion
from treegen.errors import InputError
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns

CALLS = [ToolCall("left", {"by": 1}, "call_0"), ToolCall("right", {"by": 2}, "call_1")]
QUESTION = {"role": "user", "content": "Hello."}
# Templates that end a reply with calls, and show results, in the ways of several families.
HEAD = "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}[/U]"
CALL = "{% for c in m.tool_calls %}<c>{{ c.function.name }}{{ c.function.arguments | tojson }}"
TEMPLATES = {
    "qwen": TEMPLATE,
    "ids": HEAD + "{% elif m.role == 'tool' %}[R]{{ m.tool_call_id }}|{{ m.content | tojson }}[/R]"
    "{% elif m.tool_calls %}" + CALL + "{% endfor %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "names": HEAD
    + "{% elif m.role == 'tool' %}<|im_start|>{{ m.name }}: {{ m.content.strip() }}<|im_end|>"
    "{% elif m.tool_calls %}" + CALL + "{% endfor %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}",
    "text arguments": HEAD
    + "{% elif m.role == 'tool' %}[R]{{ m.content }}[/R]{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    # Another mark than that of other replies ends a reply with calls.
    "own end": HEAD + "{% elif m.role == 'tool' %}[R]{{ m.content }}[/R]"
    "{% elif m.tool_calls %}" + CALL + "{% endfor %}<|im_start|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    # The mark with which the model stops is the beginning of the results.
    "begins": HEAD + "{% elif m.role == 'tool' %}<|im_start|>{{ m.content }}[/R]"
    "{% elif m.tool_calls %}" + CALL + "{% endfor %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
}
STOPS = {"own end": "<|im_start|>", "begins": "<|im_start|>"}


def made(template: str) -> tuple[Any, ToolTurns]:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return tokenizer, ToolTurns(tokenizer, TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("result", ["at 3", "  spaces \n", "", "<|im_end|>", 'a "b" {c}', "Hello."])
def test_results_are_what_they_add_to_the_chat(name: str, result: str) -> None:
    tokenizer, turns = made(TEMPLATES[name])
    mark = STOPS.get(name, "<|im_end|>")
    stop = tokenizer.convert_tokens_to_ids(mark)
    for num, size in itertools.product((1, 2), (1, 2)):
        if size > num:
            continue
        calls, results = CALLS[:num], [result] * size
        added = turns.render_results(calls, results, stop)
        shown: list[str] = []
        for is_whole in (False, True):
            functions: list[dict[str, Any]] = [
                {"name": call.name, "arguments": call.arguments} for call in calls[:size]
            ]
            if name == "text arguments":
                functions = [
                    {**each, "arguments": f'{{"by": {i + 1}}}'} for i, each in enumerate(functions)
                ]
            messages = [
                QUESTION,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "id": call.id, "function": function}
                        for call, function in zip(calls, functions, strict=False)
                    ],
                },
                *(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "name": call.name,
                        "content": result,
                    }
                    for call in calls[:size]
                    if is_whole
                ),
            ]
            shown.append(
                tokenizer.apply_chat_template(
                    messages, tools=TOOLS, tokenize=False, add_generation_prompt=is_whole
                )
            )
        before, whole = shown
        assert added.startswith(mark) and whole.endswith(added)
        reply_end = whole[: len(whole) - len(added)]
        assert before.startswith(reply_end) and mark not in before[len(reply_end) + len(mark) :]
        assert reply_end.endswith(("}", "</tool_call>"))


def test_a_reply_whose_end_is_not_known_ends_as_the_template_ends_it() -> None:
    tokenizer, turns = made(TEMPLATE)
    known = turns.render_results(CALLS, ["1", "2"], tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert turns.render_results(CALLS, ["1", "2"], -1) == known
    assert turns.render_results(CALLS, ["1", "2"], None) == known
    other = tokenizer.convert_tokens_to_ids("</s>")
    assert turns.render_results(CALLS, ["1", "2"], other) == known


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (HEAD + "{% endif %}{% endfor %}", "does not render the results"),
        (
            HEAD + "{% elif m.role == 'tool' %}[R]{{ m.content }}{% elif m.tool_calls %}"
            "{% if loop.last %}calls:{% endif %}" + CALL + "{% endfor %}<|im_end|>"
            "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "renders a reply differently when results follow",
        ),
        (
            HEAD + "{% elif m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{% endfor %}",
            "no tools",
        ),
    ],
)
def test_templates_that_cannot_show_results_are_refused(template: str, said: str) -> None:
    _, turns = made(template)
    with pytest.raises(InputError, match=said):
        turns.render_results(CALLS, ["1"], -1)


def test_bad_uses_are_refused() -> None:
    tokenizer, turns = made(TEMPLATE)
    with pytest.raises(InputError, match="remove the argument stop"):
        turns.render_results(CALLS, ["1"], "\n")
    with pytest.raises(InputError, match="tool_format"):
        ToolTurns(tokenizer, TOOLS, tool_format="none such")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="require a chat template"):
        ToolTurns(tokenizer, TOOLS)


def test_replies_are_read_from_tokens_or_from_text() -> None:
    tokenizer, turns = made(TEMPLATE)
    text = 'Hm.\n<tool_call>\n{"name": "left", "arguments": {"by": 1}}\n</tool_call>'
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    for tokens in ((), ids):
        reply = turns.read(
            Completion("0", 0, 0, text, tokens, (0.0,) * len(tokens), "stop", -1), ()
        )
        assert reply.calls == CALLS[:1] and reply.text == "Hm."
    thinking = turns.read(Completion("0", 0, 0, f"<think>left?</think>{text}", (), (), "stop", -1))
    assert thinking.thoughts == "left?" and thinking.calls == CALLS[:1]
