"""The state of one run, which all parts of the engine share, and how it calls optional features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treegen.common.outputs import Score, Usage
from treegen.common.params import SamplingParams
from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import ModelRunner, StateInputs
from treegen.engine.param_set import ParamSet, ParamTable
from treegen.engine.rows.table import RowTable
from treegen.engine.rows.token_store import grow_arrays
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest, LiveSegment, StateSpan
from treegen.engine.segments.store import SegmentStore
from treegen.engine.weight_update_gate import UpdateGate
from treegen.model.batch import ForwardModel
from treegen.ops.cache.pool import PagedCache, PagePool
from treegen.ops.cache.state_cache import Slots
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
    model_runner: ModelRunner
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
    """The unfinished requests, by index."""
    scores: dict[int, Score] = field(default_factory=dict)
    """The scores of finished requests that wanted scores, by index."""
    sample_segments: dict[tuple[int, int], LiveSegment] = field(default_factory=dict)
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
        return self.model_runner.sampling.of(
            [param_set.params for param_set in sets], [param_set.bias for param_set in sets], index
        )

    def param_sets_of(self, params: Ints) -> tuple[list[ParamSet], Ints]:
        """Return the distinct parameter sets of rows, and each row's index into them."""
        if (params == params[0]).all():  # the usual case, which is faster without sorting
            return [self.param_sets[int(params[0])]], np.zeros(len(params), dtype=np.int64)
        used, index = np.unique(params, return_inverse=True)
        return [self.param_sets[i] for i in used], index


CountSiblings = Callable[[Ints], Ints]
"""Returns the number of rows of each slot's request."""


class RowFeature:
    """An optional feature of samples.

    A subclass keeps its numbers of rows in arrays over the slots of the row table.

    Attributes:
        used: Whether any row has used it; until then, a step does not call it.
    """

    _fill = 0  # value of new elements of its arrays

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row uses the feature yet."""
        self._run, self.used = run, False

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Set up new rows, in place of earlier rows in the same slots.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        raise NotImplementedError

    def _grow_arrays(self) -> None:
        """Grow the arrays to the length of the row table's."""
        grow_arrays(self, len(self._run.rows.phase), self._fill)


class RowStates:
    """States of the rows of a model without recurrent layers: none, so no method has an effect.

    Other models have those of `treegen.engine.features`: `InPlaceRowStates`, `RowUpdateLists`.
    """

    def count_startable(self, slots: Ints, count_siblings: CountSiblings) -> int:
        """Return how many rows, from the first on, can start; `slots` are those of the rows."""
        return len(slots)

    def count_missing(self, segment_slots: int, *, has_row: bool) -> int:
        """Return how many slots are missing to start a request.

        Args:
            segment_slots: Number of slots that its segments need.
            has_row: Whether it needs those of a row too.
        """
        return 0

    def take(self, slots: Ints, source: int, count_siblings: CountSiblings) -> None:
        """Allocate the state slots of rows of one request.

        Args:
            slots: Row slots.
            source: State slot of their prompt.
            count_siblings: Returns the number of rows of each slot's request.
        """

    def release(self, slots: Ints) -> None:
        """Free the state slots of rows that leave."""

    def can_leave_segments(self, slots: Ints) -> bool:
        """Return whether the slots suffice for `leave_segments`; `slots` are active rows."""
        return True

    def leave_segments(self, slots: Ints, segments: Sequence[LiveSegment]) -> None:
        """Keep the states that rows have read from segments that are about to be computed again.

        Args:
            slots: Slots of the active rows.
            segments: The segments, which may get other slots for their states.
        """

    def clear(self) -> None:
        """Drop all rows; the caller has freed their slots."""

    def step(self, order: Ints) -> StateInputs | None:
        """Return the state inputs of a decode step of rows."""
        return None

    def span(self, slot: int, num: int) -> StateSpan | None:
        """Return the state slots for computing the next `num` tokens of a row in one pass."""
        return None

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int] | None:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier, NO_STATE for a missing state; None without recurrent layers.
        """
        return None

    def check(self, active: Ints, segment_slots: Sequence[Slots]) -> None:
        """Assert that every slot has one owner.

        Args:
            active: Slots of the active rows.
            segment_slots: State slots of other owners.
        """
