"""Searches against a model whose logits are a hash of what its pages hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from fakes import EOS, HistoryModel, LetterTokenizer, make_stop_conditions

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.common.spec import LayerSpec, ModelSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import ParamSet
from treegen.engine.requests.output_processor import GeneratedSegment
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest
from treegen.ops.cache.pool import PagePool
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.plan import Request
from treegen.prompts.stops import StopConditions
from treegen.search.budget import Budget
from treegen.search.live.backend import LiveBackend
from treegen.search.run import SearchRun
from treegen.search.tree.node import SearchFn
from treegen.search.tree.result import name_problems

_pools: WeakKeyDictionary[object, PagePool] = WeakKeyDictionary()

PARAMS = SamplingParams(temperature=0.9, max_tokens=6, seed=3)


def spec_of(model: HistoryModel, context_length: int = 400) -> ModelSpec:
    return ModelSpec(
        "fake", "fake", (LayerSpec(1, 1, 1),), model.vocab_size, context_length, (EOS,), 4
    )


def backend_of(
    model: HistoryModel,
    *,
    params: SamplingParams = PARAMS,
    num_pages: int = 400,
    page_size: int = 4,
    max_rows: int = 16,
    sharing: Sharing = "all",
    context_length: int = 400,
    prefill_chunk: int = 64,
    run_ahead: bool = False,
) -> LiveBackend:
    cache = model.new_cache(num_pages, page_size)

    def make_scheduler(
        stopping: StopConditions,
        on_search_sample: Callable[[LiveRequest, Completion], GeneratedSegment],
    ) -> Scheduler:
        given = EngineResources(
            model=model,
            cache=cache,
            prefix_cache=PrefixCache(cache, num_pages // 2),
            model_runner=ModelRunner(model, cache, None, "reference"),
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            run_ahead=run_ahead,
        )
        return Scheduler(
            make_plan([]),
            given,
            [ParamSet(params, stopping)],
            [],
            on_search_sample=on_search_sample,
        )

    def make_plan(requests: Sequence[Request]):  # type: ignore[no-untyped-def]
        return compile_plan(requests, token_bytes=64, num_layers=1, sharing=sharing)

    backend = LiveBackend(
        tokenizer=LetterTokenizer(model.vocab_size),
        spec=spec_of(model, context_length),
        params=params,
        max_rows=max_rows,
        make_scheduler=make_scheduler,
        make_plan=make_plan,
        make_stop_conditions=lambda params: make_stop_conditions(params, model.vocab_size),
    )
    _pools[backend] = cache.pool
    return backend


def pool_of(backend: object) -> PagePool:
    """Return the page pool of a backend that `backend_of` has made, even if it is closed."""
    return _pools[backend]


def run_of(
    backend: LiveBackend,
    fn: SearchFn,
    num: int,
    *,
    concurrency: int = 8,
    budget: Budget | None = None,
) -> SearchRun:
    problems = name_problems([f"{'acde' * 5}{chr(99 + i % 8) * (i + 1)}" for i in range(num)], str)
    return SearchRun(
        backend, fn, problems, params=PARAMS, concurrency=concurrency, budget=budget, rows=4
    )
