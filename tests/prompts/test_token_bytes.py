"""The bytes of tokens, against what tokenizers decode and what llguidance reads of them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import PreTokenizer
from trained_tokenizers import BUILDERS, FRAGMENTS, random_text, trained
from transformers import PreTrainedTokenizerFast

from treegen.prompts.token_bytes import ByteSpeller, TokenLowerBound, token_bytes
from treegen.prompts.token_text import NamedToken, TokenText, chat_logprobs
from treegen.prompts.tokens import find_too_long_prompt, tokenize
from treegen.prompts.tree import Node

BY_BYTES = ("gpt2", "llama3", "qwen", "digits from the right", "llama2", "mistral", "gemma")


def with_added(name: str) -> Any:
    """A tokenizer with added tokens that are text, two of which llguidance takes for special."""
    tokenizer = copy.deepcopy(trained(name))
    names = ("<tool_call>", "</tool_call>", "<caf\u00e9 \u0120>", "two words")
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in names])
    return tokenizer


def test_kinds_of_tokenizers_that_decode_by_bytes_are_known() -> None:
    assert tuple(name for name in BUILDERS if token_bytes(trained(name)) is not None) == BY_BYTES
    others = set(BUILDERS) - set(BY_BYTES)
    assert {"WordPiece", "Metaspace"} >= {
        type(trained(name).backend_tokenizer.decoder).__name__ for name in others
    }


@pytest.mark.parametrize("name", BY_BYTES)
def test_bytes_of_a_text_s_tokens_are_the_text(name: str) -> None:
    tokenizer = with_added(name)
    known = token_bytes(tokenizer)
    assert known is not None
    assert not known.keys() & set(tokenizer.all_special_ids)
    speller = ByteSpeller(tokenizer, [tokenizer.eos_token_id], len(tokenizer) + 5)
    for seed in range(40):
        text = random_text(seed, 12) + "<tool_call> <caf\u00e9 \u0120>two words</tool_call>"
        ids = speller(text)
        assert b"".join(known[id] for id in ids) == text.encode()
        assert not set(ids) & set(speller.special_token_ids)
        for word in ("<tool_call>", "</tool_call>", "<caf\u00e9 \u0120>", "two words"):
            assert tokenizer.convert_tokens_to_ids(word) in ids


@pytest.mark.parametrize("name", BY_BYTES)
def test_llguidance_reads_the_same_but_for_added_tokens(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = with_added(name)
    backend = tokenizer.backend_tokenizer
    size = len(tokenizer) + 5
    read = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=[2], slices=[])
    speller = ByteSpeller(tokenizer, [2], size)
    ours = llguidance.LLTokenizer(speller, eos_token=[2], slices=[])
    assert ours.vocab_size == read.vocab_size
    added = {id for id, token in backend.get_added_tokens_decoder().items() if not token.special}
    assert len(added) == 4 and set(speller.names.values()) == added
    for id in set(range(size)) - added:
        assert ours.is_special_token(id) == read.is_special_token(id)
        if not read.is_special_token(id):
            assert ours.decode_bytes([id]) == read.decode_bytes([id])
    for id in added:
        assert not ours.is_special_token(id)


def test_a_text_that_the_tokenizer_changes_is_spelled_all_the_same() -> None:
    tokenizer = with_added("qwen")  # it composes characters
    speller = ByteSpeller(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    for text in ("e\u0301", "a<|im_end|>b", "</s>", "\u212b\u0301<tool_call>"):
        assert b"".join(speller.tokens[id] for id in speller(text)) == text.encode()
        assert not set(speller(text)) & set(speller.special_token_ids)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    others = [name for name in BUILDERS if name not in BY_BYTES]
    with pytest.raises(ValueError, match="byte by byte"):
        ByteSpeller(trained(others[0]), [2], 10)


# A text never has fewer tokens than its length tells, whatever the tokenizer does to it


TELLING = ("gpt2", "llama3", "qwen", "digits from the right", "llama2", "mistral", "gemma")


def num_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.mark.parametrize("name", BUILDERS)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer = trained(name)
    least = TokenLowerBound(tokenizer)
    assert (least.of_chars(1) > 0) == (name in TELLING)
    draw = random.Random(name)
    longest = sorted(tokenizer.get_vocab(), key=len)[-40:]
    hard = [*FRAGMENTS, *map(tokenizer.convert_tokens_to_string, ([word] for word in longest))]
    texts = [random_text(seed, 60) for seed in range(60)]
    texts += [draw.choice(hard) * draw.randint(1, 300) for _ in range(200)]
    # What NFC composes to one character, and marks that it puts in another order.
    texts += ["\u03b1\u0313\u0300\u0345" * 99, "\u0301\u0323" * 99, "\u1100\u1161\u11a8" * 99]
    tight = 0.0
    for text in texts:
        num = num_tokens(text, tokenizer)
        assert least.of_text(text) <= num, text[:80]
        tight = max(tight, least.of_text(text) / max(num, 1))
    assert tight > (0.2 if name == "qwen" else 0.8) or name not in TELLING


def test_a_token_that_takes_the_spaces_beside_it_tells_nothing_of_its_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained("gpt2").backend_tokenizer)
    tokenizer.add_tokens([AddedToken("<gap>", lstrip=True, rstrip=True, normalized=False)])
    text = " " * 10_000 + "<gap>" + " " * 10_000
    assert num_tokens(text, tokenizer) == 1
    least = TokenLowerBound(tokenizer)
    assert least.of_text(text) == 0 and least.of_text("a" * 10_000) > 0


def test_of_a_pre_tokenizer_of_python_code_nothing_is_known() -> None:
    class Nothing:
        def pre_tokenize(self, text: object) -> None:
            """Cut nothing."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained("gpt2").backend_tokenizer)
    assert TokenLowerBound(tokenizer).of_chars(1) == 1
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Nothing())
    assert TokenLowerBound(tokenizer).of_chars(1) == 0


@pytest.mark.parametrize("name", ["llama3", "llama2", "wordpiece"])
def test_only_a_prompt_that_cannot_fit_is_called_longer(name: str) -> None:
    tokenizer = trained(name)
    word = max((word for word in tokenizer.get_vocab() if word.isalpha()), key=len)
    draw = random.Random(name)
    for _ in range(50):
        text = draw.choice([word * 40, random_text(draw.randrange(99), 40), "\n" * 400])
        middle: str | list[int] = [5] * draw.randrange(1, 30) if draw.random() < 0.5 else " and "
        tree = Node(text, children=[Node(middle, children=[Node(text, samples=1, id="q")])])
        (prompt,) = tokenize(tree, tokenizer)
        most = draw.randrange(len(prompt.tokens) + 20)
        found = find_too_long_prompt(tree, tokenizer, most)
        assert found is None or (found[0].id == "q" and most < found[1] <= len(prompt.tokens))
    found = find_too_long_prompt(Node("a " * 100_000, samples=1, id="q"), tokenizer, 90)
    assert (found is not None) == (name in TELLING)


# Tokens as log-probabilities name them: their bytes joined are the text


HARD = "I say \U0001f600\U0001f468\u200d\U0001f469 na\u00efve \u65e5\u672c\u8a9e <tool_call>\u00e9"


def named(tokenizer: Any, before: list[int], ids: list[int]) -> list[NamedToken]:
    tops = [[(id, 0.0), (ids[-1], -1.0)] for id in ids]
    return list(TokenText(tokenizer).iter_named_tokens(before, ids, [0.0] * len(ids), tops))


@pytest.mark.parametrize("name", BY_BYTES)
def test_bytes_joined_are_the_text_and_characters_add_up(name: str) -> None:
    tokenizer = with_added(name)
    before = tokenizer("so: ", add_special_tokens=False)["input_ids"]
    for text in (HARD, *(random_text(seed, 10) for seed in range(20))):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        found = named(tokenizer, before, ids)
        want = TokenText(tokenizer).of(before, ids)
        assert b"".join(each.bytes for each in found).decode() == want
        assert sum(each.num_characters for each in found) == len(want)
        assert all(each.top[0].bytes == each.bytes for each in found)
        assert all(each.top[1] == (tokenizer.eos_token, b"", -1.0, (), 0) for each in found)
        logprobs = json.loads(json.dumps(chat_logprobs(found, 2)))
        assert b"".join(bytes(each["bytes"]) for each in logprobs).decode() == want


@pytest.mark.parametrize("name", BY_BYTES)
def test_pieces_of_characters_are_named_by_their_bytes(name: str) -> None:
    tokenizer = with_added(name)
    known = token_bytes(tokenizer)
    assert known is not None
    ids, draw = list(known), random.Random(name)
    for _ in range(50):
        chosen = draw.sample(ids, 12)
        for id, each in zip(chosen, named(tokenizer, [], chosen), strict=True):
            own = known[id]
            if own.decode(errors="replace").encode() != own:
                assert each.bytes == own
                assert each.text == "".join(f"\\x{byte:02x}" for byte in own)
            elif id != chosen[0]:  # the first of a text may lose its space
                assert each.bytes == own and each.text.encode() == own
