"""The state of one run, which all parts of the engine share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treegen.common.outputs import Score, Usage
from treegen.common.params import SamplingParams
from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import ParamSet, ParamTable
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.engine.segments.store import SegmentStore
from treegen.engine.update_gate import UpdateGate
from treegen.model.batch import ForwardModel
from treegen.ops.cache.pool import PagedCache, PagePool
from treegen.ops.sampling.batch import SamplingBatch
from treegen.prompts.stops import StopConditions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run; the parts of the engine share and change this one object."""

    model: ForwardModel
    """The model, as far as the engine sees it."""
    cache: PagedCache
    """The paged KV cache."""
    prefix_cache: PrefixCache
    """Prefixes whose pages stay between runs."""
    executor: ModelRunner
    """Computes the passes."""
    max_rows: int
    """Maximum number of rows decoded at once."""
    store: SegmentStore
    """The segments."""
    rows: RowTable
    """The samples being decoded, by slot."""
    usage: Usage
    """Tokens, pages and seconds used so far."""
    param_sets: ParamTable
    """Sampling parameters; requests refer to them by index. More may be added."""
    gate: UpdateGate = field(default_factory=UpdateGate)
    """Has the version of the weights, and separates steps from updates of the weights."""
    requests: dict[int, LiveRequest] = field(default_factory=dict)
    """The requests that are not over, by index."""
    scores: dict[int, Score] = field(default_factory=dict)
    """The scores of finished requests that wanted scores, by index."""
    grown: dict[tuple[int, int], LiveSegment] = field(default_factory=dict)
    """The segments of finished samples of a search, by request and sample index. Each has one
    reference, which passes to the caller that removes the segment from here."""

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
            self.rows.generated.record_signals()
        return self.param_sets.add(ParamSet(params, stopping), self._params_in_use)

    def _params_in_use(self) -> set[int]:
        of_rows = np.unique(self.rows.params[self.rows.used()]).tolist()
        return {request.params for request in self.requests.values()}.union(of_rows)

    def sampling_of(self, params: Ints) -> SamplingBatch:
        """Return the sampling inputs of rows; `params` is the index of each row's set, [rows]."""
        sets, index = self.param_sets_of(params)
        return self.executor.sampling.of(
            [param_set.params for param_set in sets], [param_set.bias for param_set in sets], index
        )

    def param_sets_of(self, params: Ints) -> tuple[list[ParamSet], Ints]:
        """Return the distinct parameter sets of rows, and each row's index into them."""
        if (params == params[0]).all():  # the usual case, which is faster without sorting
            return [self.param_sets[int(params[0])]], np.zeros(len(params), dtype=np.int64)
        used, index = np.unique(params, return_inverse=True)
        return [self.param_sets[i] for i in used], index
