"""Masks of a grammar's copies against those of matchers that share nothing, and token by token."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from structured import word_tokenizer

from treegen.prompts.grammars import Grammar, Structure, _compile_structure

pytest.importorskip("llguidance")

VOCAB = 6_000
EOS = 1
PIECES = (
    r"\w+",
    "[a-z ]{2,9}",
    "[A-Z][a-z]+",
    "[0-9]{1,4}",
    "(ab|a|abc)+",
    r"[^x]{0,5}",
    r"\s",
    "é*",
    ".+",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "string", "minLength": 2, "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z][a-z]+( [a-z_0-9]+)*$"},
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"enum": ["person", "place", "thing", 7, None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "object"},
)


def random_structure(rng: np.random.Generator) -> Structure:
    if rng.random() < 0.5:
        pieces = rng.choice(PIECES, rng.integers(1, 5))
        return "regex", "".join(f"({piece}){rng.choice(['', '?', '{1,3}'])}" for piece in pieces)
    chosen = [SCHEMAS[i] for i in rng.choice(len(SCHEMAS), 3, replace=False)]
    parts = {f"k{i}": schema for i, schema in enumerate(chosen)}
    whole = {"type": "object", "properties": parts, "required": list(parts)[: rng.integers(1, 4)]}
    return "json_schema", json.dumps(whole)


def mask_of(matcher: Any) -> bytes:
    return bytes(matcher.compute_bitmask())


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_copies_are_those_of_matchers_that_share_nothing(seed: int) -> None:
    from llguidance import LLMatcher, LLTokenizer

    rng, tokenizer = np.random.default_rng(seed), word_tokenizer(VOCAB)
    structure = random_structure(rng)
    plain = LLTokenizer(
        tokenizer.backend_tokenizer.to_str(), n_vocab=VOCAB, eos_token=[EOS], slices=[]
    )

    def separate(text: list[int]) -> Any:
        made = LLMatcher(plain, _compile_structure(*structure), log_level=0)
        assert made.consume_tokens(text), made.get_error()
        return made

    grammar = Grammar(structure, tokenizer, [EOS], VOCAB)
    rows: list[tuple[Any, list[int]]] = [(grammar.start(), []) for _ in range(3)]
    for _ in range(14):
        for at, (matcher, text) in enumerate(rows):
            want, got = separate(text), mask_of(matcher)
            assert got == mask_of(want), (structure, text)
            allowed = np.unpackbits(np.frombuffer(got, np.uint8), bitorder="little")[:VOCAB]
            some = rng.choice(VOCAB, 40, replace=False)
            valid = [separate(text).validate_tokens([token]) for token in some.tolist()[:4]]
            assert valid == allowed[some[:4]].tolist()
            going = np.flatnonzero(allowed)
            going = going[going != EOS]
            if not len(going):
                rows[at] = grammar.start(), []
                continue
            if rng.random() < 0.3:  # another goes on from here, as a child of a search does
                rows[int(rng.integers(len(rows)))] = matcher.deep_copy(), list(text)
            token = int(rng.choice(going))
            assert matcher.consume_token(token)
            text.append(token)


def test_masks_of_words_are_made_in_half_the_time_of_a_walk_through_all_tokens() -> None:
    from llguidance import LLMatcher, LLTokenizer

    size = 40_000
    tokenizer, structure = word_tokenizer(size), ("regex", r"\w+")
    plain = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=[EOS])
    token = tokenizer.convert_tokens_to_ids("a")

    def seconds(matcher: Any) -> float:
        taken = []
        for _ in range(7):
            copy = matcher.deep_copy()
            assert copy.consume_token(token)
            start = time.thread_time()
            copy.compute_bitmask()
            taken.append(time.thread_time() - start)
        return min(taken)

    grammar = Grammar(structure, tokenizer, [EOS], size)
    plain_start = LLMatcher(plain, _compile_structure(*structure), log_level=0)
    assert seconds(grammar.start()) < seconds(plain_start) / 2
