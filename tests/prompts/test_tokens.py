"""Tokenizing a tree: equal to tokenizing each whole prompt, in near one pass over shared text."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trained_tokenizers import BUILDERS, FRAGMENTS, random_text, trained
from transformers import PreTrainedTokenizerFast

from treegen.errors import InputError
from treegen.prompts.splice import shared_starts
from treegen.prompts.tokens import AppendablePrompt, PromptAppender, encode_texts, tokenize
from treegen.prompts.tree import Node, prompts_of

# Random texts may begin with the BOS token that a tokenizer adds.
pytestmark = pytest.mark.filterwarnings("ignore:a prompt begins with:treegen.errors.ModelWarning")

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
# A seed instead of a text: what is shared has to be longer than a window to be spliced at all.
LONG_PIECES = st.builds(random_text, st.integers(0, 2**32), st.integers(20, 120))
ANY_TEXT = st.one_of(PIECES, LONG_PIECES, st.text(max_size=20))
TREES = st.recursive(
    st.builds(Node, ANY_TEXT),
    lambda nodes: st.builds(
        lambda text, children, samples: Node(text, children=children, samples=samples),
        st.one_of(LONG_PIECES, PIECES),
        st.lists(nodes, min_size=1, max_size=4),
        st.integers(0, 1),
    ),
    max_leaves=12,
).filter(lambda root: bool(root.children) or bool(root.content))


class Counting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Counts the characters that it is asked to encode."""

    num_characters = 0

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_characters += len(text) if isinstance(text, str) else sum(map(len, text))
        return super()._encode_plus(text, *args, **kwargs)


def counting(name: str) -> Counting:
    tokenizer = trained(name)
    return Counting(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")


def whole(text: str, name: str, *, special: bool = True) -> list[int]:
    ids: list[int] = trained(name)(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def assert_equal_to_whole_texts(texts: list[str], name: str, *, special: bool = True) -> None:
    got = encode_texts(texts, trained(name), add_special_tokens=special)
    for text, ids in zip(texts, got, strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == whole(text, name, special=special), repr(text)


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=30, deadline=None)
@given(root=TREES)
def test_prompts_of_a_tree_are_tokenized_as_whole_texts(name: str, root: Node) -> None:
    prompts = [(p, "".join(str(n.content) for n in p.path)) for p in prompts_of(root)]
    if not all(whole(text, name) for _, text in prompts):
        return  # refused, see below
    got = tokenize(root, trained(name))
    assert [(g.id, g.samples, g.node) for g in got] == [
        (p.id, p.samples, p.node) for p, _ in prompts
    ]
    for (_, text), prompt in zip(prompts, got, strict=True):
        assert prompt.tokens.tolist() == whole(text, name), repr(text)


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), starts=st.lists(LONG_PIECES, min_size=1, max_size=3), special=st.booleans())
def test_a_flat_list_is_tokenized_as_whole_texts(
    name: str, data: st.DataObject, starts: list[str], special: bool
) -> None:
    # Cut anywhere, so that texts also part in the middle of a word or of a special token.
    shared = st.sampled_from(starts).flatmap(
        lambda start: st.integers(max(0, len(start) - 9), len(start)).map(lambda n: start[:n])
    )
    texts = data.draw(st.lists(st.builds(str.__add__, shared, ANY_TEXT), max_size=8))
    assert_equal_to_whole_texts(texts, name, special=special)


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=20, deadline=None)
@given(
    start=st.one_of(LONG_PIECES, PIECES),
    added=st.lists(ANY_TEXT, min_size=1, max_size=4),
    cut=st.integers(0, 9),
)
def test_prompts_that_text_is_appended_to_are_tokenized_as_whole_texts(
    name: str, start: str, added: list[str], cut: int
) -> None:
    appender = PromptAppender(trained(name))
    text = start[: max(0, len(start) - cut)]
    prompt, ids = AppendablePrompt.of(text), np.array(whole(text, name), dtype=np.int32)
    for more in added:
        prompt, ids = appender.append(prompt, ids, more)
        text += more
        assert ids.dtype == np.int32 and ids.tolist() == whole(text, name), repr(text)


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=20, deadline=None)
@given(text=st.one_of(LONG_PIECES, PIECES), more=PIECES, seed=st.integers(0, 2**32))
def test_token_ids_that_text_is_appended_to_stay_unless_they_are_those_of_a_text(
    name: str, text: str, more: str, seed: int
) -> None:
    appender, ids = PromptAppender(trained(name)), whole(text, name, special=False)
    read = trained(name).decode(ids)
    _, got = appender.append(AppendablePrompt.of(ids), np.array(ids, dtype=np.int32), more)
    if ids == whole(read, name, special=False):
        assert got.tolist() == whole(read + more, name, special=False)
    else:
        assert got[: len(ids)].tolist() == ids
    drawn = random.Random(seed).choices(range(len(trained(name))), k=9)
    _, got = appender.append(AppendablePrompt.of(drawn), np.array(drawn, dtype=np.int32), more)
    if drawn != whole(trained(name).decode(drawn), name, special=False):
        assert got[:9].tolist() == drawn


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    "unit", [" ", "\n", "7", "a", "\u4f60", "\U0001f600", "<s>", "\u0301", "ab "]
)
def test_long_runs_of_one_thing(name: str, unit: str) -> None:
    """Neither words nor tokens to hold on to, and grouping that depends on how long the run is."""
    for length in (301, 2_600):
        run = "The start: " + unit * length
        endings = ("", unit, unit * 2, unit * 5, "x", "1", " y", "\n", "<mask>", "<|im_end|> z")
        assert_equal_to_whole_texts([run + ending for ending in endings], name)


@pytest.mark.parametrize("name", BUILDERS)
def test_long_texts_with_long_branches(name: str) -> None:
    start = random_text(1, 2_000)
    middle = [start + random_text(seed, 800) for seed in (2, 3)]
    texts = [text + random_text(seed, 10) for text in middle for seed in range(4, 8)]
    assert_equal_to_whole_texts([start, *middle, *texts, *texts], name)


@pytest.mark.parametrize("name", BUILDERS)
def test_added_tokens_across_a_boundary(name: str) -> None:
    start = random_text(5, 80) + " and then <|im_"
    texts = [start + rest for rest in ("end|>", "end|> on", "start|>x", "other|>", "")]
    assert_equal_to_whole_texts(texts, name)
    assert trained(name).convert_tokens_to_ids("<|im_end|>") in whole(texts[0], name)


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_a_long_added_token_across_a_boundary(name: str) -> None:
    """It reaches back further than any window would look for something to agree on."""
    added = "<|" + random_text(17, 60).replace("<", "") + "|>"
    backend = Tokenizer.from_str(trained(name).backend_tokenizer.to_str())
    backend.add_special_tokens([added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    start = random_text(5, 200)
    for cut in (2, len(added) // 3, len(added) - 40, len(added) - 1):
        texts = [start + added[:cut] + rest for rest in (added[cut:], added[cut:] + "x", "other")]
        for text, ids in zip(texts, encode_texts(texts, tokenizer), strict=True):
            assert ids.tolist() == tokenizer(text)["input_ids"]
        assert tokenizer.convert_tokens_to_ids(added) in tokenizer(texts[0])["input_ids"]


def test_empty_and_equal_texts_and_prefixes_of_others() -> None:
    long = random_text(9, 100)
    texts = ["", long, "", long[:50], long, long[:-1], "a", "ab", long + " more"]
    for name in BUILDERS:
        assert_equal_to_whole_texts(texts, name)
    assert encode_texts([], trained("gpt2")) == []


def test_only_starts_worth_a_window_are_encoded_apart() -> None:
    document = "word " * 200
    spans, span_of_text = shared_starts([f"{document}{letter}" for letter in "abc"] + ["x", "xy"])
    assert {span.text for span in spans} >= {document, "x", "xy"}
    assert [spans[span].text[-2:] for span in span_of_text] == [" a", " b", " c", "x", "xy"]
    assert all(span.parent is None or span.parent < index for index, span in enumerate(spans))


def document() -> str:
    folder = os.environ.get("TREEGEN_TEST_DATA")
    if folder:
        return Path(folder, "text", "war_and_peace.txt").read_text()[100_000:180_000]
    return random_text(7, 20_000)[:80_000]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "mistral", "gemma", "unigram"])
def test_shared_text_is_encoded_about_once(name: str) -> None:
    draw = random.Random(3)
    shared = document()
    start = [draw.randrange(len(shared) - 200) for _ in range(256)]
    questions = [f"\n\nQ{i}: {shared[at : at + 130]}?\nAnswer:" for i, at in enumerate(start)]
    tokenizer = counting(name)
    got = tokenize(Node(shared, children=[Node(question) for question in questions]), tokenizer)
    assert tokenizer.num_characters <= 1.5 * (len(shared) + sum(map(len, questions)))
    for index in draw.sample(range(256), 8):
        assert got[index].tokens.tolist() == whole(shared + questions[index], name)


def test_token_ids_are_used_as_they_are_and_cut_the_text() -> None:
    name = "llama3"
    root = Node(
        "The qu",
        children=[
            Node(
                "ick", children=[Node([7, 8, 9], children=[Node("brown", children=[Node(" fox")])])]
            ),
            Node([7], children=[Node([8, 9])]),
        ],
    )
    mixed, ids = tokenize(root, trained(name))
    assert mixed.tokens.tolist() == [
        *whole("The quick", name),
        *[7, 8, 9],
        *whole("brown fox", name, special=False),
    ]
    assert ids.tokens.tolist() == [*whole("The qu", name), 7, 8, 9]


def test_no_special_tokens_on_a_path_that_starts_with_token_ids() -> None:
    # The empty root is a container here, not a text.
    root = Node(children=[Node([5, 6], children=[Node("fox")]), Node([5, 6])])
    first, second = tokenize(root, trained("llama3"))
    assert first.tokens.tolist() == [5, 6, *whole("fox", "llama3", special=False)]
    assert second.tokens.tolist() == [5, 6]


def test_a_prompt_of_nothing_is_the_special_tokens_or_refused() -> None:
    assert tokenize(Node(""), trained("llama3"))[0].tokens.tolist() == whole("", "llama3")
    with pytest.raises(InputError, match="prompt 'empty' has no tokens"):
        tokenize(Node("", id="empty"), trained("gpt2"))


def chat_tokenizer() -> PreTrainedTokenizerFast:
    base = trained("qwen")
    return PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer, bos_token="<s>", chat_template=CHATML
    )


def test_messages_of_a_path_are_rendered_jointly() -> None:
    tokenizer = chat_tokenizer()
    system = {"role": "system", "content": random_text(11, 150)}
    users = [{"role": "user", "content": random_text(seed, 5)} for seed in range(6)]
    root = Node([system], children=[Node([user], children=[Node()]) for user in users])
    for prompt, user in zip(tokenize(root, tokenizer), users, strict=True):
        want = tokenizer.apply_chat_template([system, user], add_generation_prompt=True)
        assert prompt.tokens.tolist() == want["input_ids"]


def test_messages_need_a_chat_template() -> None:
    root = Node([{"role": "user", "content": "Hi"}], id="chat")
    with pytest.raises(InputError, match="'chat' has chat messages but the tokenizer has no chat"):
        tokenize(root, trained("gpt2"))


def test_a_template_that_refuses_the_messages_is_an_input_error() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    root = Node([{"role": "user", "content": "Hi"}], id="chat")
    with pytest.raises(InputError, match="rejects prompt 'chat': roles must alternate"):
        tokenize(root, tokenizer)


class AddsNoSecondBos(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Its special tokens depend on the text."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        if kwargs.get("add_special_tokens", True) and any(t.startswith("<s>") for t in texts):
            encoded = [
                super(AddsNoSecondBos, self)._encode_plus(
                    t, *args, **{**kwargs, "add_special_tokens": not t.startswith("<s>")}
                )["input_ids"]
                for t in texts
            ]
            return {"input_ids": encoded[0] if isinstance(text, str) else encoded}
        return super()._encode_plus(text, *args, **kwargs)


def test_special_tokens_that_depend_on_the_text_are_left_to_the_tokenizer() -> None:
    tokenizer = AddsNoSecondBos(
        tokenizer_object=trained("llama3").backend_tokenizer, bos_token="<s>"
    )
    texts = ["<s>a fox", "a fox"]
    got = [ids.tolist() for ids in encode_texts(texts, tokenizer)]
    assert got == [tokenizer(text)["input_ids"] for text in texts]
    assert got[0] == got[1]


class WithoutOffsets:
    """Stands for a tokenizer written in Python: text in, ids out."""

    is_fast = False

    def __call__(self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        return {
            "input_ids": trained("llama2")(text, add_special_tokens=add_special_tokens)["input_ids"]
        }


def test_a_tokenizer_without_offsets_encodes_whole_texts() -> None:
    texts = [random_text(13, 60) + ending for ending in ("", " a", " b")]
    got = encode_texts(texts, WithoutOffsets())
    assert [ids.tolist() for ids in got] == [whole(text, "llama2") for text in texts]


def test_no_warning_about_long_texts(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained("gpt2").backend_tokenizer, model_max_length=8
    )
    encode_texts([random_text(1, 50), random_text(2, 50)], tokenizer)
    assert "longer than the specified maximum" not in caplog.text


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
HI = [{"role": "user", "content": "Hi"}]


def _with_template(source: Any, **arguments: Any) -> list[int]:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = source
    tree = Node(HI, id="chat", template=arguments)
    tokens: list[int] = tokenize(tree, tokenizer)[0].tokens.tolist()
    return tokens


@pytest.mark.parametrize(
    "source",
    [
        CHATML,  # it does not read them
        "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}Hi",
        "{% set tools = [] %}{{ tools }}Hi",
        {"default": CHATML, "rag": "{{ tools }}"},
    ],
)
def test_tools_that_a_prompt_does_not_show_are_refused(source: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"chat template does not (use|render the) tools.*; remove the tools, or load",
    ):
        _with_template(source, tools=TOOLS)
    assert _with_template(source, tools=[]) == _with_template(source)


def test_tools_that_a_prompt_shows_are_taken() -> None:
    shown = "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}Hi"
    for source in (shown, {"default": CHATML, "tool_use": shown}):
        assert _with_template(source, tools=TOOLS) != _with_template(source)


def test_arguments_that_a_template_does_not_read_are_refused_by_name() -> None:
    reads = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}Hi{{ date }}"
    known = {"enable_thinking": True, "date": "1"}  # the first says what is so without it
    assert _with_template(reads, **known) == _with_template(reads, date="1")
    with pytest.raises(InputError) as caught:
        _with_template(reads, **known, enable_thinkin=False, effort=1)
    message = str(caught.value)
    assert (
        "does not read the arguments effort, enable_thinkin;" in message
        and "date, enable_thinking" in message
    )
