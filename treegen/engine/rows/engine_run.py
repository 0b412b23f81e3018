"""The state of one run, which all parts of the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from treegen.common.outputs import Score, Usage
from treegen.common.params import SamplingParams
from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import ParamSet
from treegen.engine.rows.param_table import ParamTable
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.expanded_kv import ExpandedKVCache, ExpandedKVOptions
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.engine.segments.store import SegmentStore
from treegen.model.batch import ForwardModel
from treegen.ops.cache.pool import PagedCache, PagePool
from treegen.ops.sampling.batch import SamplingBatch
from treegen.prompts.plan.plan import Plan
from treegen.prompts.stops import StopConditions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResources:
    """The model, the cache and the settings that all runs of an engine use.

    model: the model, as far as the engine sees it.
    cache: the paged KV cache.
    kept: prefixes whose pages stay between runs.
    executor: computes the passes.
    max_rows: maximum number of rows decoded at once.
    prefill_chunk: maximum number of tokens of a prefill pass.
    run_ahead: launch each pass before the results of the last one are known, so that a GPU does not
    wait for the host. A row that turns out to have ended has then been computed once too often.
    copied: which segments get expanded keys and values in addition to latents; None for none.
    """

    model: ForwardModel
    cache: PagedCache
    kept: PrefixCache
    executor: ModelRunner
    max_rows: int
    prefill_chunk: int
    run_ahead: bool = False
    copied: ExpandedKVOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun(EngineResources):
    """One run; the parts of the engine share and change this one object.

    store: the segments.
    rows: the samples being decoded, by slot.
    usage: tokens, pages and seconds used so far.
    param_sets: sampling parameters; requests refer to them by index. More may be added.
    requests: the requests that are not over, by index.
    scores: the scores of finished requests that wanted scores, by index.
    grown: the segments of finished samples of a search, by request and sample index. Each has one
    reference, which passes to the caller that removes the segment from here.
    copies: expanded keys and values; None for a model without latents.
    """

    store: SegmentStore
    rows: RowTable
    usage: Usage
    param_sets: ParamTable
    requests: dict[int, LiveRequest] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    grown: dict[tuple[int, int], LiveSegment] = field(default_factory=dict)
    copies: ExpandedKVCache | None = None

    @property
    def pool(self) -> PagePool:
        """The page pool of the cache."""
        return self.cache.pool

    def add_params(self, params: SamplingParams, stopping: StopConditions) -> int:
        """Return the index of sampling parameters; a request must use it at once.

        Parameters that no request uses any more may lose their index when other ones are added.
        """
        self.rows.record(min(params.logprobs, len(stopping.may_end)))
        if params.reports_signals:
            self.rows.record_signals()
        return self.param_sets.add(ParamSet(params, stopping), self._params_in_use)

    def _params_in_use(self) -> set[int]:
        of_rows = np.unique(self.rows.params[self.rows.used()]).tolist()
        return {request.params for request in self.requests.values()}.union(of_rows)

    def sampling_of(self, params: Ints) -> SamplingBatch:
        """Return the sampling inputs of rows; `params` is the index of each row's set, [rows]."""
        sets, index = self.param_sets_of(params)
        return self.executor.sampling.of(
            [each.params for each in sets], [each.bias for each in sets], index
        )

    def param_sets_of(self, params: Ints) -> tuple[list[ParamSet], Ints]:
        """Return the distinct parameter sets of rows, and each row's index into them."""
        if (params == params[0]).all():  # the usual case, which is faster without sorting
            return [self.param_sets[int(params[0])]], np.zeros(len(params), dtype=np.int64)
        used, index = np.unique(params, return_inverse=True)
        return [self.param_sets[i] for i in used], index


def new_run(
    plan: Plan,
    given: EngineResources,
    param_sets: Sequence[ParamSet],
    samples: Sequence[Sequence[int]],
    *,
    rewinds: bool,
) -> EngineRun:
    """Create a run.

    Args:
        plan: The requests and their segments.
        given: The model, the cache and the settings of the engine.
        param_sets: The sampling parameters known now; at least one set.
        samples: Indices of the samples to draw, for each request of the plan.
        rewinds: Whether later requests may need the last token of a segment computed again.
    """
    cache, executor = given.cache, given.executor
    first, *further = param_sets
    num_logprobs = max(each.params.logprobs for each in param_sets)
    cache.pool.peak_used = cache.pool.num_used
    encodings = executor.encodings
    rotary, blocks = None, None
    if encodings is not None:
        rotary, blocks = encodings.rotary, encodings.table.blocks
    store = SegmentStore(plan, cache, given.kept, rewinds=rewinds, rotary=rotary, blocks=blocks)
    run = EngineRun(
        **{each.name: getattr(given, each.name) for each in fields(EngineResources)},
        store=store,
        copies=None
        if given.copied is None
        else ExpandedKVCache(cache, store, executor, given.copied),
        rows=RowTable(min(num_logprobs, len(first.stopping.may_end))),
        usage=Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=executor.impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * (len(wanted) if request.rows else 1)
                for request, wanted in zip(plan.requests, samples, strict=True)
            ),
        ),
        param_sets=ParamTable(first),
    )
    if any(each.params.reports_signals for each in param_sets):
        run.rows.record_signals()
    for each in further:
        run.param_sets.add(each, lambda: range(len(run.param_sets)))
    return run
