"""The bytes of tokens, against what tokenizers decode and what llguidance reads of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import AddedToken
from trained_tokenizers import BUILDERS, random_text, trained

from treegen.prompts.token_bytes import ByteSpeller, token_bytes

BY_BYTES = [name for name in BUILDERS if token_bytes(trained(name)) is not None]


def with_added(name: str) -> Any:
    """A tokenizer with added tokens that are text, two of which llguidance takes for special."""
    tokenizer = copy.deepcopy(trained(name))
    names = ("<tool_call>", "</tool_call>", "<caf\u00e9 \u0120>", "two words")
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in names])
    return tokenizer


def test_kinds_of_tokenizers_that_decode_by_bytes_are_known() -> None:
    assert {"gpt2", "llama3", "qwen"} <= set(BY_BYTES)
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
