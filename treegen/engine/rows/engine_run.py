"""What all parts of the engine share while they work on one run."""

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
    """What the runs of an engine compute with, and how.

    model: the model, as far as the engine sees it.
    cache: the pages of keys and values.
    kept: prefixes whose pages stay between runs.
    executor: computes the passes.
    max_rows: most rows to decode at once.
    prefill_chunk: most tokens of a prefill pass.
    run_ahead: launch each pass before the results of the last one are known, so that a GPU does not
    wait for the host. A row that turns out to have ended is computed once more, in vain.
    copied: which segments have copies beside their latents; None for none.
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
    """One run. Each part of the engine is handed this one object and changes what is in it.

    store: the segments.
    rows: the samples that are being drawn, by slot.
    usage: the account of what was computed.
    param_sets: sampling parameters; requests name them by index. More may be added.
    requests: the requests that are not over, by index.
    scores: the scores of requests that are over and asked for them, by index.
    grown: the segments of samples that have ended in a search, by request and sample index. Each
    has one reference, which passes to whoever takes the segment from here.
    copies: keys and values of all heads beside latents; None for a model without latents.
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
        """The pages of the cache."""
        return self.cache.pool

    def add_params(self, params: SamplingParams, stopping: StopConditions) -> int:
        """The index of sampling parameters, for a request that is added at once.

        Parameters that no request uses any more may lose their index when others are added.
        """
        self.rows.record(min(params.logprobs, len(stopping.may_end)))
        if params.reports_signals:
            self.rows.record_signals()
        return self.param_sets.add(ParamSet(params, stopping), self._params_in_use)

    def _params_in_use(self) -> set[int]:
        of_rows = np.unique(self.rows.params[self.rows.used()]).tolist()
        return {request.params for request in self.requests.values()}.union(of_rows)

    def sampling_of(self, params: Ints) -> SamplingBatch:
        """How rows are drawn. params: [rows] the index of each row's parameters."""
        sets, index = self.param_sets_of(params)
        return self.executor.sampling.of(
            [each.params for each in sets], [each.bias for each in sets], index
        )

    def param_sets_of(self, params: Ints) -> tuple[list[ParamSet], Ints]:
        """The parameters of rows, each set once, and the place of each row's among them."""
        if (params == params[0]).all():  # the usual case, and to sort takes longer
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
    """A run that begins.

    Args:
        param_sets: The sampling parameters that are known now, at least one.
        samples: For each request of the plan, the sample indices that are wanted.
        rewinds: Whether requests may come that have the last token of a segment computed again.
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
