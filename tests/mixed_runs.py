"""Runs that mix everything at once, each drawn from a seed: what is asked, memory, passes, chance.

Prompts with samples and limits of their own, scores, kept prefixes and searches share one scheduler
with few pages; some are cancelled on the way. All that comes out must be what it would be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    EOS,
    HistoryModel,
    LetterTokenizer,
    keep_prefix,
    make_stop_conditions,
    sample_alone,
)
from penalized import bound_text, has_failed, language, plain, slow_logits

from treegen.common.drafter import NOTHING, Drafts, Ints, NewTokens, PromptInfo
from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.common.spec import DeltaSpec, LayerSpec, ModelSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import param_sets
from treegen.engine.requests.output_processor import GeneratedSegment
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest
from treegen.engine.speculative.speculation import SpeculationOptions
from treegen.errors import CapacityError, InputError, TreegenError
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import SHARING
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.stops import StopConditions
from treegen.search.budget import BudgetReached
from treegen.search.live.backend import LiveBackend
from treegen.search.session import Session, Started
from treegen.search.tree.node import SearchNode

_MAX_STEPS = 5_000


def _thinking(budget: int) -> dict[str, Any]:
    """A budget for thinking, which begins with a letter that many prompts end with."""
    tags = {"reasoning_tags": ("c", "fg"), "thinking_end": "afga"}
    return {**tags, "max_thinking_tokens": budget}


_OVERRIDES: list[dict[str, Any]] = [
    {},
    {},
    {"stop": "c"},
    {"stop": ["cd", "h"], "include_stop": True},
    {"temperature": 0},
    {"stop_token_ids": [4]},
    {"temperature": 0.5, "top_k": 3},
    _thinking(0),
    _thinking(2),
    {**_thinking(1), "temperature": 0},
    {**_thinking(7), "stop": "h"},
]
_STRUCTURES: list[dict[str, Any]] = [
    {},
    {"regex": "a(c|d)?(e|dd){1,2}"},
    {"choice": ["ae", "add", "dca", "d"]},
    {"regex": "(ad){1,3}"},
    {"choice": ["acacd", "accde"]},
    {"grammar": 'start: pair pair?\npair: "a" ("d" | "e" "c")'},
]
_PENALTIES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1},
    {"bad_words": ["a", "cd", "efg"]},
    {
        "presence_penalty": -0.4,
        "frequency_penalty": 0.8,
        "repetition_penalty": 0.7,
        "no_repeat_ngram_size": 3,
        "bad_words": ["dc"],
        "logit_bias": {3: 2.0},
        "min_tokens": 1,
    },
]


class _Recorded(Scheduler):
    """A scheduler that remembers what it has returned beside what searches asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.finished: list[Completion] = []
        self.all_scores: dict[int, Score] = {}

    def step(self) -> list[Completion]:
        finished = super().step()
        self.finished += finished
        self.all_scores |= self.scores
        return finished


@dataclass(frozen=True)
class _Call:
    """Something that a search was asked for. texts: to score, or params: of samples."""

    node: SearchNode
    started: Started[Any]
    params: SamplingParams | None = None
    texts: Sequence[str] = ()


class _Knowing:
    """A drafter that knows what rows draw next, and is wrong now and then."""

    def __init__(self, model: HistoryModel, rng: np.random.Generator) -> None:
        self.model, self.rng = model, rng
        self.scheduler: Scheduler | None = None
        self.noted: list[int] = []

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        assert (new.num_R > 0).all()
        for request in set(new.request.tolist()):
            assert len(request_of(request).tokens)

    def run_deferred(self) -> None:
        pass

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        assert (accepted_R <= tried_R).all()
        self.noted += accepted_R.tolist()

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        most = int(room_R.max(initial=0))
        tokens = np.full((len(slots), most), NOTHING)
        for slot, guess in zip(slots.tolist(), tokens, strict=True):
            length = int(self.rng.integers(0, most + 1))
            guess[:length] = self._next(slot, length)
            if length and self.rng.random() < 0.4:
                guess[self.rng.integers(length)] = self.rng.integers(-1, self.model.vocab_size + 2)
        return Drafts(tokens, np.full(len(slots), 0.5), np.zeros(len(slots), np.int64))

    def _next(self, slot: int, num: int) -> list[int]:
        assert self.scheduler is not None
        run, rows = self.scheduler.run, self.scheduler.run.rows
        request, each = run.requests[int(rows.request[slot])], run.param_sets[rows.params[slot]]
        known = [*request.segment.path_tokens().tolist(), *rows.tokens(np.array([slot]))[0]]
        begun = len(known) - int(rows.count[slot])
        one = SamplingBatch.of([plain(each.params)], torch.zeros(1, dtype=torch.int64))
        drawn = [
            segment.params is not None
            for segment in [*request.segment.path()][::-1]
            for _ in segment.tokens
        ]
        drawn += [True] * (len(known) + num - len(drawn))
        seed, start = torch.tensor([[int(rows.seed[slot])]]), len(known)
        for _ in range(num):
            step = torch.tensor([[len(known) - begun]])
            logits = self.model.logits(known)
            logits = slow_logits(logits, known, drawn[: len(known)], each, int(step))[None]
            known.append(int(draw(logits, seed, step, one).tokens_PN))
        return known[start:]


class MixedRun:
    """One run, made of a seed.

    recurrent: on a model that keeps states too. delta: whose rows list updates of these.
    speculates: guesses tokens, most of them right.
    penalized: with penalties on what is in the text.
    structured: with grammars of what is drawn.
    """

    def __init__(
        self,
        seed: int,
        *,
        recurrent: bool = False,
        delta: DeltaSpec | None = None,
        speculates: bool = False,
        penalized: bool = False,
        structured: bool = False,
    ) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.speculates, self.penalized, self.structured = speculates, penalized, structured
        self.drawn_with: dict[str, SamplingParams] = {}  # of sampled nodes
        eos_bias = rng.choice([-20.0, -20.0, 0.0, 1.5])
        self.model = HistoryModel(eos_bias=eos_bias, recurrent=recurrent, delta=delta)
        self.all_params = [
            SamplingParams(
                seed=seed % 7, max_tokens=12, **self._overrides(), **self._logprob_options()
            )
            for _ in range(3)
        ]
        self.params = self.all_params[0]  # of searches too
        self.params_of: list[int] = []
        self.wanted: list[list[int]] = []
        self.page_size = int(rng.integers(1, 6))
        self.long = int(rng.choice([4, 20, 60]))
        self.trunk = self._letters(0, self.long)
        self.plan = self._plan([self._request(i) for i in range(rng.integers(0, 6))])
        self.cancelled: set[tuple[str, int]] = set()
        self.calls: list[_Call] = []
        self.scheduler = self._make()
        self.session = Session(self.backend, self.params)
        self.nodes: list[SearchNode] = []

    def run(self) -> None:
        """To the end, asking for more on the way; asserts that all is as it should be."""
        num_actions, steps = int(self.rng.integers(0, 30)), 0
        haste, squeeze = self.rng.choice([0.2, 0.6, 0.9]), self.rng.choice([0.0, 0.1, 0.4])
        while num_actions or self.backend.has_work:
            while num_actions and (self.rng.random() < haste or not self.backend.has_work):
                num_actions -= 1
                self._act()
                self.scheduler.check()
            if steps < 300 and self.rng.random() < squeeze:  # for ever, nothing would get on
                self._give_way()
            self.session.step()
            self.scheduler.check()
            steps += 1
            assert steps < _MAX_STEPS, "the run does not end"
        self.session.step()  # of what was stopped last
        self._check_plan()
        for call in self.calls:
            if call.params is not None and call.started.error is None:
                self.drawn_with |= dict.fromkeys(
                    [child.key for child in call.started.result], call.params
                )
        for call in self.calls:
            self._check_call(call)
        assert not len(self.scheduler.run.rows.used())
        for node in self.nodes:
            node.drop()
        self.session.close()
        self.kept_cache.pool.check(self.kept.tables())
        if self.kept_cache.states is not None:
            self.kept_cache.states.check([self.kept.states()])

    # What is asked

    def _pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def _overrides(self) -> dict[str, Any]:
        more = self._pick(_PENALTIES) if self.penalized else {}
        found = {**self._pick(_OVERRIDES), **more}
        if self.structured:
            found.pop("min_tokens", None)
            if shape := self._pick(_STRUCTURES):
                found = {**found, "regex": None, "choice": None, "grammar": None, **shape}
        return found

    def _logprob_options(self) -> dict[str, Any]:
        options: dict[str, Any] = self._pick(
            [{}, {"logprobs": 3}, {"logprobs": 1, "confidence": 2}]
        )
        return options

    def _letters(self, least: int, most: int) -> str:
        return "".join(self._pick("acd") for _ in range(self.rng.integers(least, most + 1)))

    def _request(self, index: int) -> Request:
        rng, params = self.rng, self._params_of(index)
        cut = int(rng.integers(0, len(self.trunk) + 1))
        text = self.trunk[:cut] + self._letters(1, self._pick([2, 14, self.long]))
        tokens = np.array([ord(letter) - 97 for letter in text], np.int32)
        if len(tokens) > 1 and rng.random() < 0.25:
            start = int(rng.integers(1, len(tokens)))
            return Request(f"s{index}", tokens, 0, 0, 1, score_from=start, top=index % 4)
        samples = int(rng.integers(0, 7))
        rows = min(samples, 1) if params.temperature == 0 else samples
        request = Request(f"p{index}", tokens, samples, rows, self._limit())
        if samples and len(tokens) > 1 and index % 2:  # with the log-probabilities of its prompt
            request = replace(request, score_from=1, top=index - 1)
        return request

    def _params_of(self, index: int) -> SamplingParams:
        while len(self.params_of) <= index:
            self.params_of.append(int(self.rng.integers(len(self.all_params))))
        return self.all_params[self.params_of[index]]

    def _limit(self) -> int:
        return int(self.rng.integers(1, self._pick([3, 8, 24, 60]) + 1))

    def _plan(self, requests: Sequence[Request], split_at: Sequence[Any] = ()) -> Plan:
        if not hasattr(self, "_sharing"):
            self._sharing = self._pick(SHARING)
            self._align = self._pick([1, self.page_size])
        return compile_plan(
            requests,
            token_bytes=64,
            num_layers=1,
            sharing=self._sharing,
            split_at=split_at,
            align=self._align,
        )

    def _act(self) -> None:
        live = [node for node in self.nodes if node.is_live and node.search.stopped is None]
        action = self._pick(["root", *["sample"] * 5, "score", "score", "extend", "drop", "stop"])
        if self.rng.random() < 0.1 and self.plan.requests:
            self._cancel()
        elif action == "root" or not live:
            cut = int(self.rng.integers(0, len(self.trunk) + 1))
            own = self._letters(1, self._pick([9, self.long]))
            self.nodes.append(self.session.root(self.trunk[:cut] + own))
        elif action == "sample":
            self._sample(self._pick(live))
        elif action == "score":
            node = self._pick(live)
            texts = [self._letters(1, self._pick([3, 20])) for _ in range(self.rng.integers(1, 4))]
            self._ask(node, node.score(texts), texts=texts)
        elif action == "extend":
            self.nodes.append(self._pick(live).extend(self._letters(0, self._pick([3, 20]))))
        elif action == "drop":
            self._pick(live).drop()
        elif self.rng.random() < 0.3:
            self._pick(live).search.stop("enough")

    def _sample(self, node: SearchNode) -> None:
        overrides = {**self._overrides(), "max_tokens": max(self._limit(), 1)}
        params = replace(self.params, **overrides)
        count = 1 if params.temperature == 0 else int(self.rng.integers(1, 7))
        self._ask(node, node.sample(count, **overrides), params=params)

    def _ask(self, node: SearchNode, call: Coroutine[Any, Any, Any], **what: Any) -> None:
        started = self.session.start(call)
        self.calls.append(_Call(node, started, **what))
        self.nodes += [child for child in node.children if child not in self.nodes]

    def _budgets_before(
        self, node: SearchNode, params: SamplingParams
    ) -> list[tuple[int, int | None]] | None:
        """Of the samples above that have the grammar of a node's samples, as in `bound_text`.

        None if what they drew begins no text of it. A sample without any letter begins no text.
        """
        whole = [ord(letter) - 97 for letter in node.path[0].text + node.path_text]
        budgets: list[tuple[int, int | None]] = []
        start = len(whole)
        for above in reversed(node.path):
            start -= len(above.text)
            if above.tokens and above.text:
                drawn_with = self.drawn_with[above.key]
                if drawn_with.structure != params.structure:
                    break
                budgets.insert(0, (start, drawn_with.max_thinking_tokens))
        if params.structure is None or not budgets:
            return []
        bound = bound_text(whole, params, [*budgets, (len(whole), None)])
        known = language(params.structure)
        return budgets if bound is None or any(t.startswith(bound) for t in known) else None

    def _cancel(self) -> None:
        index = int(self.rng.integers(len(self.plan.requests)))
        request = self.plan.requests[index]
        sample = self._pick([None, *range(request.samples)])
        self.scheduler.cancel(index, sample)
        chosen = range(request.samples) if sample is None else [sample]
        self.cancelled |= {(request.id, i) for i in chosen}
        if sample is None:
            self.cancelled.add((request.id, -1))

    def _give_way(self) -> None:
        """As when pages run out in a decode step, which happens at few moments by itself."""
        self.scheduler._collect_results()
        self.scheduler._admission.reclaim_pages()
        self.scheduler.check()

    # What it runs on

    def _make(self) -> _Recorded:
        rng, size = self.rng, self.page_size
        prefixes = [
            np.array([ord(letter) - 97 for letter in self.trunk[: rng.integers(1, 30)]], np.int32)
            for _ in range(rng.integers(0, 3) if self.trunk else 0)
        ]
        kept_pages = sum(-(-len(tokens) // size) + 1 for tokens in prefixes)
        self.plan = self._plan(self.plan.requests, prefixes)
        alone = [self.plan.get_single_row_pages(i, size) for i in range(len(self.plan.requests))]
        room = int(rng.choice([50, 80, 130])) // size
        num_pages = max(*alone, 2 * kept_pages, room, 0) + int(rng.integers(0, 9))
        # One state and one before it of each segment and row, and room for little more.
        deepest = [self.plan.get_single_row_states(i) for i in range(len(self.plan.requests))]
        num_states = 2 * max(*deepest, 3 + len(prefixes), 0) + int(rng.choice([0, 1, 4, 20]))
        self.kept_cache = cache = self.model.new_cache(num_pages, size, num_states)
        self.kept = kept = PrefixCache(cache, kept_pages)
        for index, tokens in enumerate(prefixes):
            keep_prefix(f"k{index}", tokens.tolist(), self.model, cache, kept)
        max_rows, chunk = int(rng.integers(1, 9)), int(rng.choice([2, 4, 8, 30]))
        run_ahead = bool(rng.random() < 0.7)
        drafter = _Knowing(self.model, rng)
        most, early_samples = int(rng.integers(1, 7)), int(rng.choice([0, 1, 4]))
        speculation = SpeculationOptions(lambda *_: drafter, most, early_samples=early_samples)
        # Of a run that is resumed, some samples are there.
        self.wanted = wanted = [
            [i for i in range(request.samples) if rng.random() < 0.8]
            if request.rows > 1 and request.score_from is None
            else list(range(request.samples))
            for request in self.plan.requests
        ]

        all_params = [self.params, *map(self._params_of, range(len(wanted)))]
        sets, params_of = param_sets(all_params, make_stop_conditions)

        def make_scheduler(
            stopping: StopConditions,
            on_search_sample: Callable[[LiveRequest, Completion], GeneratedSegment],
        ) -> Scheduler:
            given = EngineResources(
                model=self.model,
                cache=cache,
                prefix_cache=kept,
                model_runner=ModelRunner(self.model, cache, None, "reference"),
                max_rows=max_rows,
                prefill_chunk=chunk,
                run_ahead=run_ahead,
            )
            return _Recorded(
                self.plan,
                given,
                sets,
                wanted,
                params_of=params_of[1:],
                on_search_sample=on_search_sample,
                speculation=speculation if self.speculates else None,
            )

        vocab_size = self.model.vocab_size
        self.backend = LiveBackend(
            tokenizer=LetterTokenizer(vocab_size),
            spec=ModelSpec("fake", "fake", (LayerSpec(1, 1, 1),), vocab_size, 200, (EOS,), 4),
            params=self.params,
            max_rows=max_rows,
            make_stop_conditions=lambda params: make_stop_conditions(params, vocab_size),
            make_scheduler=make_scheduler,
            make_plan=self._plan,
        )
        assert isinstance(self.backend.scheduler, _Recorded)
        drafter.scheduler, self.drafter = self.backend.scheduler, drafter
        return self.backend.scheduler

    # What must come of it

    def _check_plan(self) -> None:
        got = {(c.prompt_id, c.sample_index): c for c in self.scheduler.finished}
        scores = {c.prompt_id: c.prompt_logprobs for c in self.scheduler.finished}
        for index, request in enumerate(self.plan.requests):
            prompt = request.tokens.tolist()
            if request.score_from is not None:
                score = self.scheduler.all_scores.get(index) or scores.get(request.id)
                assert score or (request.id, -1) in self.cancelled or request.samples
                if score:
                    start = request.score_from
                    self._check_score(score, prompt[:start], prompt[start:], request.top)
            else:
                assert scores.get(request.id) is None
            params = self._params_of(index)
            for sample in self.wanted[index]:
                name = request.id, sample
                assert name in got or name in self.cancelled, f"{name} is lost"
                if name in got:
                    found = got.pop(name)
                    if found.finish_reason == "error":
                        budgets = [(len(prompt), params.max_thinking_tokens)]
                        assert has_failed([*prompt, *found.tokens], params, budgets)
                    assert found.tokens == sample_alone(
                        self.model, prompt, *name, params, limit=request.max_tokens
                    )
                    self._check_top_logprobs(found, prompt, params)
        drawn = {call.node.key for call in self.calls if call.params is not None}
        assert {name for name, _ in got} <= drawn

    def _check_top_logprobs(
        self, found: Completion, prompt: list[int], params: SamplingParams
    ) -> None:
        """The log-probabilities of a sample are the model's own, whatever it was drawn under."""
        assert len(found.logprobs) == len(found.tokens)
        top_logprobs = found.top_logprobs if params.logprobs else [()] * len(found.tokens)
        assert len(found.confidences) == (len(found.tokens) if params.confidence else 0)
        for at, (token, pairs) in enumerate(zip(found.tokens, top_logprobs, strict=True)):
            want = self.model.logits([*prompt, *found.tokens[:at]]).log_softmax(-1)
            assert found.logprobs[at] == pytest.approx(float(want[token]), abs=1e-4)
            best = sorted(want.tolist(), reverse=True)[: params.logprobs]
            assert [logprob for _, logprob in pairs] == pytest.approx(best, abs=1e-4)
            assert [float(want[each]) for each, _ in pairs] == pytest.approx(best, abs=1e-4)

    def _check_score(
        self, score: Score, context: list[int], tokens: Sequence[int], top: int = 0
    ) -> None:
        assert score.tokens == tuple(tokens)
        top_logprobs = score.top.pairs() if score.top is not None else [()] * len(tokens)
        for at, token in enumerate(tokens):
            want = self.model.logits([*context, *tokens[:at]]).log_softmax(-1)
            assert score.logprobs[at] == pytest.approx(float(want[token]), abs=1e-4)
            best = sorted(want.tolist(), reverse=True)[:top]
            assert [logprob for _, logprob in top_logprobs[at]] == pytest.approx(best, abs=1e-4)
            assert [float(want[each]) for each, _ in top_logprobs[at]] == pytest.approx(
                best, abs=1e-4
            )

    def _check_call(self, call: _Call) -> None:
        assert call.started.is_done, "a call was never done"
        node = call.node
        text = node.path[0].text + node.path_text
        drawn = [bool(each.tokens) for each in node.path for _ in each.text]
        context = [ord(letter) - 97 for letter in text]
        try:
            result = call.started.result
        except (CapacityError, BudgetReached) as error:
            assert isinstance(error, TreegenError)
            return
        except InputError:
            assert call.params is not None and self._budgets_before(node, call.params) is None
            return
        if call.params is None:
            for each, score in zip(call.texts, result, strict=True):
                self._check_score(score, context, [ord(letter) - 97 for letter in each])
            return
        budgets = self._budgets_before(node, call.params)
        if budgets is None:
            raise AssertionError("a text was begun that its grammar does not have")
        for child in result:
            if child.finish_reason == "error":
                both = [*budgets, (len(context), call.params.max_thinking_tokens)]
                assert has_failed([*context, *child.tokens], call.params, both)
            assert child.tokens == sample_alone(
                self.model,
                context,
                node.search.origin_of(node.key),
                child.order[1],
                call.params,
                limit=min(call.params.max_tokens, 200 - len(context)),
                before=drawn,
                budgets=budgets,
            )
