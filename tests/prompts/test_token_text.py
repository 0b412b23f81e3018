"""Tokens as log-probabilities name them: their bytes joined are the text."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken
from trained_tokenizers import BUILDERS, random_text, trained

from treegen.prompts.token_bytes import token_bytes
from treegen.prompts.token_text import NamedToken, TokenText, chat_logprobs

HARD = "I say \U0001f600\U0001f468\u200d\U0001f469 na\u00efve \u65e5\u672c\u8a9e <tool_call>\u00e9"
BY_BYTES = [name for name in BUILDERS if token_bytes(trained(name)) is not None]


def with_added(name: str) -> Any:
    tokenizer = copy.deepcopy(trained(name))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer


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
        told = json.loads(json.dumps(chat_logprobs(found)))
        assert b"".join(bytes(each["bytes"]) for each in told).decode() == want


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
