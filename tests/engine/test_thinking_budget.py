"""Budgets for thinking, on tiny real checkpoints: against stock transformers, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_cases import load
from transformers import AddedToken, AutoModelForCausalLM

from treegen import LLM, AsyncLLM, Completion, InputError, Node, SamplingParams
from treegen.engine.param_set import ParamSet
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.prompts.plan.draws import row_seed

OPEN, CLOSE = "<think>", "</think>"
SIZE = tiny_models.VOCAB_SIZE + 2
OPEN_ID, CLOSE_ID = SIZE - 2, SIZE - 1
TEXTS = {
    "inside": f"Q: Bob has 14 pens. How many?\nA: {OPEN}\n",
    "outside": "Q: Bob has 14 pens. How many?\nA:",
}
# Some samples open a thinking of their own, and some end it before their budget does.
BIAS = {OPEN_ID: 3.5, CLOSE_ID: 3.0}


@pytest.fixture(scope="module", params=[False, True], ids=["shown", "special"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tags are tokens; as special ones they are in no text."""
    path = tmp_path_factory.mktemp("thinker")
    tiny_models.save_tiny_model(path, "llama", vocab_size=SIZE)
    tokenizer = tiny_models.tiny_tokenizer().__class__.from_pretrained(path)
    tokenizer.add_tokens(
        [AddedToken(tag, special=request.param, normalized=False) for tag in (OPEN, CLOSE)],
        special_tokens=request.param,
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return load(checkpoint)


def tree_of(samples: int) -> Node:
    leaves = [Node(text, samples=samples, id=name) for name, text in TEXTS.items()]
    return Node("", children=leaves, samples=0)


def params_of(budget: int, **more: Any) -> SamplingParams:
    given = {"seed": 4, "max_tokens": 24, "logit_bias": BIAS, "ignore_eos": True, **more}
    return SamplingParams(max_thinking_tokens=budget, **given)


def alone(
    stock: Any, llm: LLM, prompt: str, seed: int, params: SamplingParams, sample: Completion
) -> tuple[list[int], list[float]]:
    """Draw each token of a sample anew below those before it, up to the first that is another.

    One pass of the stock model, which is causal, has the logits below every prefix of the sample.
    """
    ids = llm.tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logits_TV = stock(torch.tensor([[*ids, *sample.tokens]])).logits[0].float()
    tokens: list[int] = []
    logprobs: list[float] = []
    bias = ParamSet(params, llm.make_stop_conditions(params)).bias
    one = SamplingBatch.of([params], torch.zeros(1, dtype=torch.int64), [bias])
    open, close = params.reasoning_tags or (OPEN, CLOSE)
    begun = 0 if prompt.rstrip().endswith(open) else None
    queue: list[int] = []
    budget = params.max_thinking_tokens
    assert budget is not None
    while len(tokens) < params.max_tokens and tokens == list(sample.tokens[: len(tokens)]):
        shown = llm.tokenizer.decode(tokens)
        if begun is None and shown.lstrip().startswith(open):
            begun = len(tokens)
        if begun is not None and len(tokens) == begun + budget and close not in shown:
            queue = llm.tokenizer(f"\n{close}\n\n")["input_ids"]
        logits = logits_TV[len(ids) + len(tokens) - 1][None]
        step = torch.tensor([[len(tokens)]])
        drawn = int(draw(logits, torch.tensor([[seed]]), step, one).tokens_PN)
        tokens.append(queue.pop(0) if queue else drawn)
        logprobs.append(float(logits[0].log_softmax(-1)[tokens[-1]]))
    return tokens, logprobs


@pytest.mark.parametrize("budget", [0, 1, 4, 9])
def test_a_budget_gives_what_drawing_each_token_anew_gives(llm: LLM, budget: int) -> None:
    stock = AutoModelForCausalLM.from_pretrained(llm.spec.name, attn_implementation="eager")
    # Greedy samples of a prompt are all the same.
    for params, num in ((params_of(budget), 5), (params_of(budget, temperature=0), 1)):
        for c in llm.run(tree_of(num), params).completions:
            seed = row_seed(params.seed, c.prompt_id, c.sample_index)
            tokens, logprobs = alone(stock, llm, TEXTS[c.prompt_id], seed, params, c)
            assert list(c.tokens) == tokens
            # Those of forced tokens are the model's too.
            assert c.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("budget", [0, 2])
def test_a_thinking_that_opens_after_space_or_by_other_tokens_has_its_budget(
    llm: LLM, budget: int
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(llm.spec.name, attn_implementation="eager")
    spell = {text: llm.tokenizer(text)["input_ids"] for text in ("\n", " ", "a", "b")}
    assert all(len(ids) == 1 for ids in spell.values())
    space = {ids[0]: 7.0 for text, ids in spell.items() if text.isspace()}
    letters = {ids[0]: 8.0 for text, ids in spell.items() if not text.isspace()}
    tree = Node(TEXTS["outside"], samples=16, id="outside")
    for params in (
        params_of(budget, logit_bias=space | {OPEN_ID: 8.0}),
        params_of(budget, logit_bias=space | letters, reasoning_tags=("ba", "yz")),
    ):
        num_forced = 0
        for c in llm.run(tree, params).completions:
            seed = row_seed(params.seed, c.prompt_id, c.sample_index)
            assert list(c.tokens) == alone(stock, llm, TEXTS["outside"], seed, params, c)[0]
            if c.thinking is not None and c.tokens[0] in space:
                num_forced += c.thinking.is_forced
        assert num_forced, params.reasoning_tags


def result(completions: Sequence[Completion]) -> list[Any]:
    return [(c.prompt_id, c.sample_index, c.tokens, c.text, c.thinking) for c in completions]


def test_a_sample_is_the_same_whatever_runs_beside_it(checkpoint: Path, llm: LLM) -> None:
    params = params_of(5, temperature=0.9)
    want = result(llm.run(tree_of(4), params).completions)
    assert any(c[-1] is not None and c[-1].is_forced for c in want)
    page = 4 * llm.spec.kv_bytes_per_token
    for options in (
        {"max_rows": 1},
        {"max_rows": 3, "run_ahead": True},
        {"run_ahead": True},
        {"memory": 16 * page, "page_size": 4, "run_ahead": True},
        {"memory": 40 * page, "page_size": 4},
        {"sharing": "off", "reproducible": True},
    ):
        assert result(load(checkpoint, **options).run(tree_of(4), params).completions) == want
    with llm.stream(tree_of(4), params, skip={("inside", i) for i in range(0, 4, 2)}) as stream:
        found = {(c.prompt_id, c.sample_index): c.tokens for c in stream}
    assert found.items() <= {c[:2]: c[2] for c in want}.items()


def test_with_and_without_a_budget_side_by_side(checkpoint: Path) -> None:
    llm = load(checkpoint, run_ahead=True)
    both = [params_of(3), params_of(3), params_of(11), replace(params_of(0), seed=9)]
    both[1] = replace(both[1], max_thinking_tokens=None)
    prompts = [TEXTS["inside"]] * 4
    together = llm.generate(prompts, [replace(each, n=3) for each in both])
    for place, params in enumerate(both):
        # A prompt that is given twice with one seed gets further samples.
        if place in (0, 3):
            apart = llm.generate(prompts[:1], replace(params, n=3))[0]
            assert [c.tokens for c in together[place]] == [c.tokens for c in apart]
    assert all(len(c.tokens) == 24 for group in together for c in group)
    assert not any(c.thinking and c.thinking.is_forced for c in together[1])


def test_the_parts_of_a_sample(llm: LLM) -> None:
    for c in llm.run(tree_of(12), params_of(5)).completions:
        text, found = c.text, c.thinking
        if c.tokens[0] != OPEN_ID and CLOSE_ID not in c.tokens and c.prompt_id == "outside":
            assert found is None and c.answer == text
            continue
        assert found is not None and found.is_closed == (CLOSE_ID in c.tokens)
        if found.is_closed:
            assert found.num_tokens == c.tokens.index(CLOSE_ID) + 1
            rest = c.tokens[found.num_tokens :]
            assert text[found.end :] == llm.tokenizer.decode(rest, skip_special_tokens=True)
            assert c.answer == text[found.end :].lstrip("\n")
            if CLOSE in text:
                assert text[: found.end].endswith(CLOSE)
        else:
            assert (found.num_tokens, found.end, c.answer) == (len(c.tokens), len(text), "")


def test_sessions_and_many_callers_have_budgets_too(checkpoint: Path) -> None:
    llm = load(checkpoint)
    params = params_of(4)
    forced = tuple(llm.tokenizer(f"\n{CLOSE}\n\n")["input_ids"])

    drawn: list[Any] = []

    async def search(root: Any) -> None:
        drawn.extend(await root.sample(6))

    llm.search(search, [("one", TEXTS["inside"])], params)

    async def ask() -> list[Completion]:
        with AsyncLLM(llm) as many:
            each = [replace(params, n=2, seed=seed) for seed in range(3)]
            found = await asyncio.gather(*(many.generate([TEXTS["inside"]], p) for p in each))
        return [c for _, (group,) in found for c in group]

    for c in [*asyncio.run(ask()), *drawn]:
        if CLOSE_ID not in c.tokens[:4]:
            assert c.tokens[4 : 4 + len(forced)] == forced


def test_what_cannot_close_a_thinking_is_refused(llm: LLM, tmp_path: Path) -> None:
    def refused(message: str, **given: Any) -> None:
        with pytest.raises(InputError, match=message):
            llm.run(tree_of(1), params_of(3, **given))

    refused("occurs in the text that ends the reasoning", stop=["\n\n"])
    refused("which ends a sample", stop_token_ids=[CLOSE_ID])
    refused("must contain the tag that ends", thinking_end="so")
    with pytest.raises(InputError, match="reasoning_tags"):
        SamplingParams(reasoning_tags=("a",))
    with pytest.raises(InputError, match="max_thinking_tokens must be at least 0"):
        SamplingParams(max_thinking_tokens=-1)
    with pytest.raises(InputError, match="closing tag 'b', so reasoning would end"):
        SamplingParams(reasoning_tags=("abc", "b"))
    plain = load(tiny_models.save_tiny_model(tmp_path))
    with pytest.raises(InputError, match=r"reasoning_tags=\('<think>', '</think>'\)"):
        plain.run(tree_of(1), SamplingParams(max_thinking_tokens=3))
    found = plain.run(tree_of(2), SamplingParams(reasoning_tags="auto", max_tokens=3))
    assert all(c.thinking is None for c in found.completions)
    own = SamplingParams(max_thinking_tokens=3, reasoning_tags=(OPEN, CLOSE), max_tokens=30)
    assert any(CLOSE in c.text for c in plain.run(tree_of(4), own).completions)
