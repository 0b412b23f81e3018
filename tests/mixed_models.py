"""Small models under everything that a sample can have, by chance.

All that comes out must be what one row draws alone, whatever runs beside it: with few pages,
guesses, splits, forks, penalties, grammars and thinking, and in which form latents are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from guessing import Always, Knowing, guessed
from latent_cases import force, small
from torch import Tensor

from treegen import LLM, Completion, Node, SamplingParams
from treegen.common.outputs import Score
from treegen.errors import InputError
from treegen.ops.attention import latent as latents
from treegen.ops.sampling import draw
from treegen.prompts.plan.cost_model import CostModel
from treegen.prompts.plan.requests import build_sample_requests
from treegen.search import SearchNode

_DRAWS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0},
    {"temperature": 0.6, "top_k": 20},
    {"top_p": 0.9, "min_p": 0.01},
]
_PENALTIES: list[dict[str, Any]] = [
    {},
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2, "bad_words": ["a", "the", " 1"], "logit_bias": {40: 3.0}},
]
_STRUCTURES: list[dict[str, Any]] = [
    {},
    {},
    {"regex": "(ab|c)[0-9]{1,3}"},
    {"choice": ["yes", "no", "not at all"]},
    {"grammar": 'start: "(" start* ")"'},
    {
        "json_schema": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
]
_THINKING = {"reasoning_tags": ("Q", "A"), "thinking_end": " A:"}
_TOLD: list[dict[str, Any]] = [
    {},
    {"logprobs": 4},
    {"prompt_logprobs": 2},
    {"logprobs": 1, "confidence": 3},
]


def _params(rng: np.random.Generator) -> SamplingParams:
    def pick(choices: list[dict[str, Any]]) -> dict[str, Any]:
        return choices[int(rng.integers(len(choices)))]

    given = {**pick(_DRAWS), **pick(_PENALTIES), **pick(_STRUCTURES), **pick(_TOLD)}
    if rng.random() < 0.3:
        given |= {**_THINKING, "max_thinking_tokens": int(rng.integers(0, 6))}
    elif rng.random() < 0.3:
        given["stop"] = ["e", "\n"]
    return SamplingParams(
        n=int(rng.integers(1, 5)),
        seed=int(rng.integers(9)),
        max_tokens=int(rng.integers(1, 15)),
        **given,
    )


_ROUNDING = 1e-6
"""How far rounding may move a boundary between two tokens in the cumulative distribution."""


def _record_close_draws(patch: pytest.MonkeyPatch) -> set[frozenset[int]]:
    """Record, from now on, the two tokens of each draw that rounding may decide."""
    close: set[frozenset[int]] = set()
    stock = draw._inverse_cdf

    def record(weights_PV: Tensor, uniform_PN: Tensor) -> Tensor:
        below_PN = stock(weights_PV, (uniform_PN - _ROUNDING).clamp(min=0))
        above_PN = stock(weights_PV, uniform_PN + _ROUNDING)
        at = below_PN != above_PN
        pairs = zip(below_PN[at].tolist(), above_PN[at].tolist(), strict=True)
        close.update(frozenset(pair) for pair in pairs)
        return stock(weights_PV, uniform_PN)

    patch.setattr(draw, "_inverse_cdf", record)
    return close


def _same(actual: Completion, expected: Completion, close: set[frozenset[int]]) -> None:
    """Check that completions are the same, up to a token that rounding decides."""
    pairs = enumerate(zip(actual.tokens, expected.tokens, strict=False))
    num = next((i for i, pair in pairs if pair[0] != pair[1]), None)
    if num is None or frozenset((actual.tokens[num], expected.tokens[num])) not in close:
        num = None
        assert (actual.tokens, actual.text, actual.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
        assert actual.thinking == expected.thinking
    assert actual.logprobs[:num] == pytest.approx(expected.logprobs[:num], abs=1e-4)
    assert actual.confidences[:num] == pytest.approx(expected.confidences[:num], abs=1e-3)
    for some, others in zip(actual.top_logprobs[:num], expected.top_logprobs[:num], strict=True):
        assert [logprob for _, logprob in some] == pytest.approx(
            [logprob for _, logprob in others], abs=1e-4
        )
    assert (actual.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    if actual.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        _same_score(actual.prompt_logprobs, expected.prompt_logprobs)


def _same_score(actual: Score, expected: Score) -> None:
    assert actual.tokens == expected.tokens
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


class Mixed:
    """One model and all that is asked of it, made of a seed."""

    def __init__(self, llm: LLM, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """alone: reads latents as they are, a row at a time. few: has pages for few rows."""
        self.rng = rng = np.random.default_rng(seed)
        self.monkeypatch = monkeypatch
        self.alone = LLM(
            llm.model, tokenizer=llm.tokenizer, max_rows=1, sharing="off", memory="1MiB"
        )
        form = ["absorbed", "expanded", "chosen", "any"][int(rng.integers(4))]
        page_size = int(rng.choice([1, 3, 4, 8]))
        options: dict[str, Any] = {
            "page_size": page_size,
            "sharing": str(rng.choice(["all", "auto", "off"])),
            "memory": int(rng.integers(300, 500)) * llm.spec.kv_bytes_per_token,
        }
        if not llm.spec.states and rng.random() < 0.2:
            options["reproducible"] = True
        self.few = small(llm, seed, **options)
        self.form = form
        self.trunk = rng.integers(3, 320, min(llm.spec.context_length // 5, 40)).tolist()

    def read(self) -> None:
        """Latents are read in the form of the seed, from now on."""
        if self.form != "any":
            force(self.form, self.monkeypatch)
            return
        # A form is chosen anew whenever rows change.
        dice = np.random.default_rng(int(self.rng.integers(2**32)))
        force("chosen", self.monkeypatch)
        self.monkeypatch.setattr(CostModel, "should_expand", lambda *_: bool(dice.random() < 0.7))
        self.monkeypatch.setattr(latents, "rows_to_expand", lambda _: float(dice.integers(1, 30)))

    def run(self) -> None:
        """Prompts, then searches that score too."""
        self._prompts()
        self._searches()

    def _prompt(self) -> list[int]:
        rng = self.rng
        cut = int(rng.integers(0, len(self.trunk)))
        own: list[int] = rng.integers(3, 320, int(rng.integers(1, 9))).tolist()
        if rng.random() < 0.4:
            own += self.few.tokenizer.encode("Q")
        return [*self.trunk[:cut], *own]

    def _prompts(self) -> None:
        rng, few, alone = self.rng, self.few, self.alone
        prompts = [self._prompt() for _ in range(5)]
        params = [_params(rng) for _ in prompts]
        leaves = [
            Node(ids, samples=each.n, id=str(i))
            for i, (ids, each) in enumerate(zip(prompts, params, strict=True))
        ]
        tree = Node("", children=leaves, samples=0)
        requests = build_sample_requests(tree, few.tokenizer, params, few.spec)
        # Of a run that is resumed, some samples are there.
        wanted = [
            [i for i in range(request.samples) if request.rows < 2 or rng.random() < 0.8]
            for request in requests
        ]
        want: dict[tuple[str, int], Completion] = {}
        with self.monkeypatch.context() as patch:
            force("absorbed", patch)
            close = _record_close_draws(patch)
            for request, each, some in zip(requests, params, wanted, strict=True):
                with alone._start(alone._plan([request]), [each], [some]) as stream:
                    want |= {(c.prompt_id, c.sample_index): c for c in stream}
        if rng.random() < 0.5 and not few.spec.states:
            self.monkeypatch.setattr(
                "treegen.engine.speculative.speculation.DraftLengthController", Always
            )
            guessed(few, Knowing(want.values(), int(rng.integers(99)), strict=False))
        self.read()
        if rng.random() < 0.7:
            few.keep(few.tokenizer.decode(self.trunk[:10]))
        cancelled: set[str] = set()
        got: dict[tuple[str, int], Completion] = {}
        with few._start(few._plan(requests), params, wanted) as stream:
            scheduler = stream.scheduler
            while stream.has_work:
                got |= {(c.prompt_id, c.sample_index): c for c in stream.step()}
                if rng.random() < 0.15:
                    scheduler._collect_results()
                    scheduler._admission.reclaim_pages()
                if rng.random() < 0.02:
                    index = int(rng.integers(len(requests)))
                    scheduler.cancel(index)
                    cancelled.add(requests[index].id)
                scheduler.check()
        assert got.keys() <= want.keys()
        assert {name for name, _ in want.keys() - got.keys()} <= cancelled
        for name, completion in got.items():
            _same(completion, want[name], close)

    def _searches(self) -> None:
        """Nodes that are sampled, extended and scored in the same order on both."""
        rng, few = self.rng, self.few
        orders = [int(rng.integers(2**32)) for _ in range(2)]
        prompts = [few.tokenizer.decode(self._prompt()) for _ in orders]
        params = replace(_params(rng), n=1, prompt_logprobs=None)

        def grow(order: int) -> Callable[[SearchNode], Any]:
            async def grown(root: SearchNode) -> list[Any]:
                return await _grown(root, np.random.default_rng(order))

            return grown

        found = []
        for llm in (self.alone, few):
            with self.monkeypatch.context() as patch:
                if llm is self.alone:
                    force("absorbed", patch)
                with llm.session(params) as session:
                    started = [
                        session.start(grow(order)(session.root(prompt)))
                        for order, prompt in zip(orders, prompts, strict=True)
                    ]
                    while not all(each.is_done for each in started):
                        session.step()
                    found.append([each.result for each in started])
        for expected, actual in zip(*found, strict=True):
            assert len(expected) == len(actual)
            for some, others in zip(expected, actual, strict=True):
                assert type(some) is type(others)
                if isinstance(some, Score):
                    _same_score(others, some)
                else:
                    assert some == others


async def _grown(root: SearchNode, rng: np.random.Generator) -> list[Any]:
    """What a search drew and scored, in its order."""
    results: list[Any] = []
    nodes = [root]
    for _ in range(6):
        node = nodes[int(rng.integers(len(nodes)))]
        action, num, most = rng.random(), int(rng.integers(1, 4)), int(rng.integers(1, 7))
        if action < 0.6:
            try:
                children = await node.sample(num, max_tokens=most)
            except InputError as error:  # what was drawn before begins no text of a grammar
                results.append(str(error))
                continue
            nodes += children
            results += [(child.tokens, child.finish_reason) for child in children]
        elif action < 0.8:
            nodes.append(node.extend(" and 5" if num > 1 else "\nQ"))
        else:
            results += await node.score([" 17", "\n"][:num])
    return results
