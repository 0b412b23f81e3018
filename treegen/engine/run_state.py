"""What all parts of the engine share while they work on one run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treegen.cache.kept import KeptPrefixes
from treegen.cache.pool import PagedCache, PagePool
from treegen.device import to_device
from treegen.engine.layout import Ints
from treegen.engine.rows import RowTable
from treegen.engine.segment import LiveRequest, LiveSegment
from treegen.engine.store import SegmentStore
from treegen.model.batch import Forward
from treegen.outputs import Score, Usage
from treegen.sampling.draw import SamplingBatch
from treegen.sampling.param_set import ParamSet


@dataclass(frozen=True, slots=True)
class RunState:
    """One run. Each part of the engine is handed this one object and changes what is in it.

    cache, kept: pages, and prefixes that keep theirs between runs. store: segments.
    rows: samples that are being drawn, by slot. usage: the account.
    param_sets: sampling parameters, which requests name by index; may grow.
    impl: of attention. max_rows: live rows at most.
    requests: those that are not over, by index.
    scores: of requests that asked for them and are over, by index.
    grown: segments of samples that have ended, by request and sample, each with a reference for
    whoever takes them from here.
    """

    model: Forward
    cache: PagedCache
    kept: KeptPrefixes
    store: SegmentStore
    rows: RowTable
    usage: Usage
    param_sets: list[ParamSet]
    impl: str
    max_rows: int
    requests: dict[int, LiveRequest] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    grown: dict[tuple[int, int], LiveSegment] = field(default_factory=dict)

    @property
    def pool(self) -> PagePool:
        """The pages of the cache."""
        return self.cache.pool

    def sampling_of(self, params: Ints) -> SamplingBatch:
        """How some rows are drawn, by the index of each one's parameters."""
        used, index = np.unique(params, return_inverse=True)
        sets = [self.param_sets[i] for i in used]
        return SamplingBatch.of(
            [each.params for each in sets],
            to_device(index, self.model.device),
            [each.bias for each in sets],
        )
