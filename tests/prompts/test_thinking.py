"""Where samples think and where they answer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_tokenizer
from trained_tokenizers import trained
from transformers import AddedToken

from treegen.common.outputs import answer_after
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.prompts.reasoning import reasoning_arguments
from treegen.prompts.thinking import KNOWN, ThinkingTags, tags_of, thinking_of

TAGS = ("<think>", "</think>")


def thinking(tokenizer: Any, **given: Any) -> ThinkingTags:
    found = thinking_of(SamplingParams(reasoning_tags=TAGS, **given), tokenizer)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral", "unigram"])
@pytest.mark.parametrize("prompt", ["Q: 1 + 1?", "Q: 1 + 1? <think>\n"])
@pytest.mark.parametrize(
    "sample",
    [
        "<think>so 1 + 1</think>\n\nIt is 2.",
        "one more</think>It is 2.",
        "It is 2.",
        "<think>and so on and on",
        "</think>2",
        "<think></think></think>",
    ],
)
def test_tags_that_are_spelled_by_many_tokens(name: str, prompt: str, sample: str) -> None:
    """The split is where the text has the tag, whatever tokens spell it."""
    tokenizer = trained(name)
    tags = thinking(tokenizer)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, sample)]
    text = tokenizer.decode(ids[1])
    found = tags.split(ids[0], ids[1], text, None)
    begins = text.lstrip().startswith("<think>") or prompt.endswith("<think>\n")
    if "</think>" not in text:
        assert (found is not None) == begins
        assert found is None or (found.end, found.is_closed) == (len(text), False)
        assert (tags.due(ids[0], ids[1], 3) is not None) == begins
        return
    assert found is not None and found.is_closed and tags.due(ids[0], ids[1], 3) is None
    at = text.index("</think>") + len("</think>")
    assert found.end == at and text[at:].lstrip("\n") == answer_after(text, found)
    # The tokens are the fewest that have the tag.
    assert "</think>" in tokenizer.decode(ids[1][: found.num_tokens])
    assert "</think>" not in tokenizer.decode(ids[1][: found.num_tokens - 1])


def test_arrays_of_tokens_will_do() -> None:
    tokenizer = tiny_tokenizer()
    tags = thinking(tokenizer)
    prompt, sample = (
        np.array(tokenizer(text)["input_ids"]) for text in ("Q <think>", "a</think>b")
    )
    found = tags.split(prompt, sample, "a</think>b", None)
    assert found is not None and found.end == len("a</think>")
    assert tags.first_due(prompt, 7) == tags.due(prompt, sample[:1], 7) == 7


def test_tags_may_end_in_space() -> None:
    tokenizer = tiny_tokenizer()
    tags = thinking_of(SamplingParams(reasoning_tags=("<think>\n", "\n</think>\n")), tokenizer)
    assert tags is not None
    for prompt, opens, closes in (
        ("Q<think>\n", True, False),
        ("Q<think>\n\n ", True, False),
        ("Q<think>", False, False),
        ("a\n</think>\n\n", False, True),
        ("\n</think>", False, False),
    ):
        ids = tokenizer(prompt)["input_ids"]
        assert (tags.opens(ids), tags.closes(ids)) == (opens, closes), prompt


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral", "unigram"])
def test_a_sample_may_open_its_thinking_after_space_and_by_any_tokens(name: str) -> None:
    tokenizer = trained(name)
    tags = thinking(tokenizer)
    prompt = tokenizer("Q: 1 + 1?", add_special_tokens=False)["input_ids"]
    for text in ("<think>so", " \n\n <think>so", "\u3000<think>\n"):
        spelled = [
            token
            for letter in text
            for token in tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        # Other tokenizers put a space before each letter.
        for ids in (whole, spelled) if name == "gpt2" else (whole,):
            for num in range(1, len(ids) + 1):
                shown = tokenizer.decode(ids[:num]).lstrip()
                if shown.startswith("<think>"):
                    break
                assert tags.due(prompt, ids[:num], 2) == num + 1
            assert tags.due(prompt, ids, 2) == num + 2 and tags.due(prompt, ids, 0) == num
    for text in ("so", "<thought>", "a <think>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tags.due(prompt, ids, 2) is None


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral", "unigram"])
def test_a_sample_may_open_its_thinking_by_a_tag_that_begins_with_space(name: str) -> None:
    tokenizer = trained(name)
    tags = thinking_of(SamplingParams(reasoning_tags=(" the", "</think>")), tokenizer)
    assert tags is not None and tags.opening_id is not None
    prompt = np.array(tokenizer("so")["input_ids"])
    tokens = np.array([tags.opening_id])
    assert tags.begins(prompt, tokens) and tags.due(prompt, tokens, 2) == 3


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral", "unigram"])
@pytest.mark.parametrize("close", ["</think>", "A", "the fox", " caf\u00e9", "\u65e5\u672c ", "ox"])
def test_a_token_that_may_close_the_reasoning_is_known_before(name: str, close: str) -> None:
    tokenizer = trained(name)
    if close == "</think>":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([AddedToken(close, normalized=False)])
    tags = thinking_of(SamplingParams(reasoning_tags=("<think>", close)), tokenizer)
    assert tags is not None
    rng = np.random.default_rng(5)
    num_closed = num_open = 0
    for _ in range(300):
        # A beginning of the tag, its parts and other tokens.
        parts = [close, close[:1], close[1:], close[2:5], *"</think>", "so", "the"]
        ids = rng.integers(0, len(tokenizer) + 2, 12).tolist()  # and two that are no tokens
        for _ in range(int(rng.integers(6))):
            text = close[: int(rng.integers(len(close)))] + parts[rng.integers(len(parts))]
            at = int(rng.integers(len(ids)))
            ids[at:at] = tokenizer(text, add_special_tokens=False)["input_ids"]
        for num in range(1, len(ids) + 1):
            is_closed = close in tokenizer.decode(ids[:num], skip_special_tokens=False)
            num_new = int(rng.integers(1, num + 1))
            if is_closed:
                num_closed += 1
                assert tags.num_open(ids[:num]) < num
                if close in tokenizer.decode(ids[: num - num_new]):
                    continue
                assert tags.may_close(ids[:num][-num_new - tags.num_context :], num_new)
                break
            num_open += not tags.may_close(ids[:num], num_new)
    assert num_closed and num_open


def test_tags_are_known_by_the_template_or_by_tokens() -> None:
    def of(template: Any, *added: str) -> Any:
        vocab = dict.fromkeys(added, 5)
        return tags_of(SimpleNamespace(chat_template=template, get_added_vocab=lambda: vocab))

    assert of(None) is None and of("{{ messages }}", "<s>") is None
    assert of(None, "</think>") == KNOWN[0]
    assert of("{% if x %}</think>{% endif %}") == KNOWN[0]
    assert of({"default": "", "tool_use": "[/THINK]"}) == KNOWN[1]
    assert of("<|start|>assistant<|channel|>final<|message|>") == KNOWN[-1]


def test_what_a_budget_forces_is_the_tag_between_newlines() -> None:
    tokenizer = tiny_tokenizer()
    found = thinking(tokenizer, max_thinking_tokens=3)
    assert tokenizer.decode(found.end) == "\n</think>\n\n"
    own = thinking(tokenizer, max_thinking_tokens=3, thinking_end=" Enough.</think>")
    assert tokenizer.decode(own.end) == " Enough.</think>"


QWEN = "{% if enable_thinking is defined and enable_thinking is false %}a{% endif %}{{ messages }}"
GRANITE = "{%- if thinking %}t{% endif %}{% generation %}{{ messages }}{% endgeneration %}"
OSS = "{% if not reasoning_effort %}{% set reasoning_effort = 'medium' %}{% endif %}{{ messages }}"
MISTRAL = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'none' %}{% endif %}"
SET = "{% set thinking = messages %}{{ thinking }}"


@pytest.mark.parametrize(
    ("template", "reasoning", "want"),
    [
        (QWEN, "on", {"enable_thinking": True}),
        (QWEN, "off", {"enable_thinking": False}),
        (GRANITE, "off", {"thinking": False}),
        (OSS, "on", {"reasoning_effort": "medium"}),
        (OSS, "low", {"reasoning_effort": "low"}),
        (MISTRAL, "off", {"reasoning_effort": "none"}),
        (MISTRAL, "on", {"reasoning_effort": "high"}),
        (SET, "auto", {}),
        (OSS, "off", "reasoning 'off' requires .* has only reasoning_effort"),
        (QWEN, "high", "has only enable_thinking"),
        (SET, "on", "this template has none"),
    ],
)
def test_thinking_is_switched_as_the_template_knows_it(
    template: str, reasoning: str, want: Any
) -> None:
    tokenizer = SimpleNamespace(chat_template=template)
    if isinstance(want, dict):
        given = {"reasoning": reasoning, "tools": []}
        assert reasoning_arguments(given, tokenizer) == {**want, "tools": []}
        return
    with pytest.raises(InputError, match=want):
        reasoning_arguments({"reasoning": reasoning}, tokenizer)


def test_an_argument_that_a_template_has_by_that_name_is_left_alone() -> None:
    tokenizer = SimpleNamespace(chat_template="{{ reasoning }}")
    assert reasoning_arguments({"reasoning": False}, tokenizer) == {"reasoning": False}
    assert reasoning_arguments({"reasoning": "off"}, tokenizer) == {"reasoning": False}


def test_the_channels_of_harmony() -> None:
    """Tags of several tokens, of which some are special and some are text."""
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer.from_str(
            tiny_tokenizer().backend_tokenizer.to_str()
        )
    )
    names = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>"]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
    tokenizer.chat_template = "<|channel|>final<|message|>"
    found = thinking_of(SamplingParams(max_thinking_tokens=5), tokenizer)
    assert found is not None and found.tags == KNOWN[-1]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt, begin = ids("<|start|>assistant"), "<|channel|>analysis<|message|>"
    thought = f"{begin}3 + 4 is 7.<|end|><|start|>assistant<|channel|>final<|message|>"
    text = tokenizer.decode(ids(f"{thought}Seven."), skip_special_tokens=True)
    assert text == "analysis3 + 4 is 7.assistantfinalSeven."
    split = found.split(prompt, ids(f"{thought}Seven."), text, 5)
    assert split is not None and split.num_tokens == len(ids(thought))
    assert (split.is_closed, split.is_forced, text[split.end :]) == (True, False, "Seven.")
    due = found.due(prompt, ids(f"{begin}3 + 4"), 5)
    assert due == 5 + len(ids(begin)) and found.due(prompt, ids("final 7"), 5) is None
    forced = [*ids(f"{begin}3 + 4 is 7.")][:due]
    split = found.split(prompt, [*forced, *found.end, *ids("7")], "", 5)
    assert split is not None and split.is_forced
