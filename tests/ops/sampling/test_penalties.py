"""Penalties against transformers' processors, and against plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import make_stop_conditions
from penalized import plain, slow_logits
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from treegen import LLM, InputError, Node, SamplingParams
from treegen.engine.param_set import ParamSet
from treegen.ops.attention import HostLevel
from treegen.ops.sampling import draw as drawing
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.ops.sampling.penalties import Penalties
from treegen.ops.sampling.token_history import TokenHistory

SIZE = 4  # tokens of a page
VOCAB = 24


def made_texts(
    rng: np.random.Generator, rows: int
) -> tuple[TokenHistory, list[list[int]], list[list[bool]]]:
    """Ragged texts in two levels: one prompt for each few rows, and the rows' own tokens."""
    groups = np.sort(rng.integers(0, 3, rows))
    lengths_G = rng.integers(1, 14, 3)
    prompts = [rng.integers(2, 7, length).tolist() for length in lengths_G]
    own = [rng.integers(2, 7, rng.integers(0, 11)).tolist() for _ in range(rows)]
    tables = rng.permutation(np.arange(1, 1 + 4 * (3 + rows))).reshape(-1, 4)
    tokens_S = torch.full((SIZE * (len(tables) * 4 + 1),), 9, dtype=torch.int32)
    for table, text in zip(tables, [*prompts, *own], strict=True):
        for at, token in enumerate(text):
            tokens_S[table[at // SIZE] * SIZE + at % SIZE] = token
    used = np.unique(groups)
    start, stop = np.searchsorted(groups, used), np.searchsorted(groups, used, "right")
    place, num = np.arange(rows), np.array(list(map(len, own)))
    levels = [
        HostLevel(start, stop, tables[used], lengths_G[used], used * 0, causal=False),
        HostLevel(place, place + 1, tables[3:], num, lengths_G[groups], causal=False),
    ]
    texts = [[*prompts[group], *tokens] for group, tokens in zip(groups.tolist(), own, strict=True)]
    # The second half of each prompt was drawn too.
    ends = lengths_G[groups]
    runs = np.stack([ends // 2, ends, ends, ends + 99], axis=1).reshape(rows, 2, 2)
    drawn = [
        [end // 2 <= at for at in range(len(text))]
        for end, text in zip(ends.tolist(), texts, strict=True)
    ]
    lengths = np.array(list(map(len, texts)))
    return TokenHistory.of(tokens_S, SIZE, levels, lengths, runs), texts, drawn


CHOICES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"bad_words": ["c", "de", "fcd"]},
    {
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 0.6,
        "no_repeat_ngram_size": 2,
        "bad_words": ["ee"],
        "logit_bias": {3: 5.0},
        "min_tokens": 3,
    },
    {"bad_words": [chr(97 + token) for token in range(VOCAB)]},  # nothing would be left
]


@pytest.mark.parametrize("at_once", [2**24, 60])
@pytest.mark.parametrize("seed", range(6))
def test_penalties_are_those_of_plain_python(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_MAX_LOGITS", at_once)
    rng, rows = np.random.default_rng(seed), 17
    texts, lists, drawn = made_texts(rng, rows)
    logits = torch.from_numpy(rng.normal(size=(rows, VOCAB)).astype(np.float32) * 3)
    logits[3, 5] = -torch.inf
    kinds = [
        ParamSet(each, make_stop_conditions(each, VOCAB))
        for each in (SamplingParams(**how, logprobs=2) for how in CHOICES)
    ]
    index = torch.from_numpy(rng.integers(0, len(kinds), rows))
    params, biases = [each.params for each in kinds], [each.bias for each in kinds]
    seeds = torch.arange(3 * rows).reshape(rows, 3)
    steps = torch.from_numpy(rng.integers(0, 5, (rows, 1))).expand(rows, 3)
    got = draw(logits, seeds, steps, SamplingBatch.of(params, index, biases), texts=texts)
    for row in range(rows):
        each, step = kinds[int(index[row])], int(steps[row, 0])
        given = slow_logits(logits[row], lists[row], drawn[row], each, step)[None]
        one = SamplingBatch.of([plain(each.params)], torch.zeros(1, dtype=torch.int64))
        want = draw(given, seeds[row : row + 1], steps[row : row + 1], one)
        assert got.tokens_PN[row].tolist() == want.tokens_PN[0].tolist()
    # Log-probabilities are the model's own.
    torch.testing.assert_close(got.logprobs_PN, logits.log_softmax(-1).gather(1, got.tokens_PN))


@pytest.mark.parametrize("seed", range(4))
def test_penalties_are_those_of_transformers(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), 9
    texts, lists, _ = made_texts(rng, rows)
    logits = torch.from_numpy(rng.normal(size=(rows, VOCAB)).astype(np.float32) * 3)
    zeros = torch.zeros(rows, dtype=torch.int64)
    for by in (0.4, 1.3):
        params = [SamplingParams(repetition_penalty=by)]
        penalties = Penalties.of(params, [()], zeros)
        assert penalties is not None
        want = [
            RepetitionPenaltyLogitsProcessor(by)(torch.tensor([text]), logits[row : row + 1])
            for row, text in enumerate(lists)
        ]
        assert penalties.apply(logits, texts).equal(torch.cat(want))
    for size in (1, 2, 3, 5, 40):
        params = [SamplingParams(no_repeat_ngram_size=size)]
        penalties = Penalties.of(params, [()], zeros)
        assert penalties is not None
        want = [
            NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), logits[row : row + 1])
            for row, text in enumerate(lists)
        ]
        assert penalties.apply(logits, texts).equal(torch.cat(want))


@pytest.mark.parametrize(
    "options", [{}, {"speculate": "ngram", "sharing": "all"}, {"sharing": "off", "run_ahead": True}]
)
def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(checkpoint), device="cpu", memory="8MiB", max_rows=3, check=False, **options)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = ["Q: Bob has 14 pens. Bob has 14 pens. How", "Q: Bob has 14 pens.", "A: the the the"]
    tree = Node("", children=[Node(text, samples=2, id=text) for text in prompts], samples=0)
    for how in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
    ):
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **how)
        for completion in llm.run(tree, params).completions:
            ids = torch.tensor([llm.tokenizer(completion.prompt_id)["input_ids"]])
            want: Tensor = stock.generate(
                ids, do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0, **how
            )
            assert list(completion.tokens) == want[0, ids.shape[1] :].tolist()


def test_a_bad_word_is_in_no_sample(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), device="cpu", memory="8MiB", check=False)
    params = SamplingParams(max_tokens=40, seed=1, n=12, ignore_eos=True)
    before = [c.text for c in llm.generate(["Q: Bob has"], params)[0]]
    assert any("e" in text for text in before)
    barred = SamplingParams(max_tokens=40, seed=1, n=12, ignore_eos=True, bad_words=["e", "th"])
    for completion in llm.generate(["Q: Bob has"], barred)[0]:
        tokens = llm.tokenizer.convert_ids_to_tokens(completion.tokens)
        assert "e" not in tokens and "Ġe" not in tokens and "th" not in tokens
    # Space is a word too, and then no other space is meant.
    newline = tuple(llm.tokenizer("\n")["input_ids"])
    assert llm.make_stop_conditions(SamplingParams(bad_words=["\n"])).bad_words == (newline,)
    with pytest.raises(InputError, match="the bad word 'é' has no tokens"):
        make_stop_conditions(SamplingParams(bad_words=["é"]))
