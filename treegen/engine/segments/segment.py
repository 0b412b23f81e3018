"""Live segments and requests: one object each, for as long as the run needs it.

A Plan lists the segments and requests with which a run starts. A search adds more: prompts, pieces
of given text, and generated text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treegen.common.outputs import Score
from treegen.common.params import SamplingParams
from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.ops.cache.pool import Pages
from treegen.ops.cache.state_cache import NO_STATE, Slots
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.plan.plan import Request, row_pages, segment_pages
from treegen.prompts.radix import Tokens

NEVER = 2**62
"""A position that no token has; it means "no position"."""


@dataclass(slots=True, eq=False)
class LiveSegment:
    """Tokens that all rows and segments below share; see `PlanSegment`."""

    index: int
    """Its index in the run."""
    parent: LiveSegment | None
    """The segment above it; None for a root."""
    start: int
    """Position of the first token."""
    tokens: Tokens
    """The token ids."""
    is_cascaded: bool
    """Whether it is a cascaded segment: rows and segments that start below it from now on read it
    as an attention level of its own."""
    base: int
    """First position that its page table covers; before `start` if segments above are folded into
    it."""
    above: tuple[int, ...]
    """Indices of the cascaded segments above that position, root first."""
    align: int = 1
    """Attention levels begin at multiples of this number of positions."""
    table: Pages | None = None
    """Its pages; None while it is not in memory."""
    computed: int = 0
    """Position up to which its keys and values are computed."""
    was_computed: int = 0
    """The highest value that `computed` has had."""
    continued: bool = False
    """Whether the keys and values before `start` that its table covers are computed too; False
    without a table."""
    is_recomputing: bool = False
    """Whether its last token is computed again although other open requests use it as complete;
    False without open requests."""
    first_logit: int = NEVER
    """First position whose logits are needed."""
    scored: int = NEVER
    """First position whose logits are needed for scores."""
    top: int = 0
    """Number of most likely tokens to report for each scored token."""
    refs: int = 0
    """Number of children, unfinished requests and handles that need it. Only `SegmentStore.retain`
    and `release` change it."""
    openers: dict[LiveRequest, None] = field(default_factory=dict)
    """Open requests that need it in memory. Without any, it is idle if it has a table."""
    children: dict[int, LiveSegment] = field(default_factory=dict)
    """Segments that start where it stops, by index."""
    requests: dict[LiveRequest, None] = field(default_factory=dict)
    """Unfinished requests whose prompts end with it."""
    reuse: tuple[CachedPrefix, int] | None = None
    """A cached prefix that has its first tokens, and the position up to which it has them."""
    logprobs: NDArray[np.float32] | None = None
    """Log-probabilities as far as they are known, [tokens]."""
    is_best: NDArray[np.bool_] | None = None
    """Whether each token is the most likely one, [tokens]."""
    most_likely: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """The most likely tokens and their log-probabilities, [tokens, top], if requested."""
    end_state: int = NO_STATE
    """Slot of the recurrent state after its last token, which it owns; see `SegmentStates`."""
    penultimate_state: int = NO_STATE
    """Slot of the recurrent state before its last token, which it owns too."""
    shift: int = 0
    """Shift of rotary positions at its start, by images above; see `MRopePositions`."""
    params: SamplingParams | None = None
    """The sampling parameters with which a sample of a search has drawn it; None for given text."""
    images: Sequence[PlacedImage] = ()
    """The images among its tokens, which their table keeps while the segment exists."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def chain(self) -> tuple[int, ...]:
        """Cascaded segments that rows and segments below it read as levels of their own."""
        return (*self.above, self.index) if self.is_cascaded else self.above

    @property
    def base_below(self) -> int:
        """First position of the table of a row or segment that starts below it now."""
        return self.stop // self.align * self.align if self.is_cascaded else self.base

    @property
    def has_folded_parent(self) -> bool:
        """Whether its table begins with keys of the segment above, which is folded into it."""
        return self.base < self.start

    @property
    def is_untouched(self) -> bool:
        """Whether no token of it, nor of segments below it, was ever computed."""
        return self.table is None and self.was_computed == self.start

    def path(self) -> Iterator[LiveSegment]:
        """Yield this segment and all segments above it, root last."""
        segment: LiveSegment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def path_tokens(self, start: int = 0) -> Tokens:
        """Return the tokens from a position in it, or in a segment above it, to its end."""
        parts: list[Tokens] = []
        for above in self.path():
            parts.append(above.tokens[max(start - above.start, 0) :])
            if above.start <= start:
                break
        return np.concatenate(parts[::-1])

    def mark_computed(self, stop: int) -> None:
        """Record that its keys and values are computed up to a position."""
        self.computed = stop
        self.is_recomputing &= stop < self.stop
        self.was_computed = max(self.was_computed, stop)

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages of its complete table."""
        return -(-(self.stop - self.base) // page_size)

    def missing_pages(self, page_size: int) -> int:
        """Return how many pages to allocate for it; it shares the full pages of a folded parent."""
        if self.table is None:
            return segment_pages(self.base, self.start, self.stop, page_size)
        return max(self.num_pages(page_size) - len(self.table), 0)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An unfinished request and its state."""

    index: int
    """Its index in the run."""
    rank: int
    """Sort key of requests: depth first, or in a search by order of arrival."""
    spec: Request
    """The request as submitted."""
    segment: LiveSegment
    """The segment at the end of its prompt."""
    params: int
    """Index of its sampling parameters."""
    samples: list[int]
    """Indices of the samples that have not ended. A finished greedy request keeps all until
    they are reported."""
    num_undrawn: int = 0
    """Number of its rows, while it is open and their first tokens are still to be drawn."""
    slots: set[int] | None = None
    """Slots of the rows that have not ended; None until first tokens are being drawn."""
    opened: list[LiveSegment] | None = None
    """Segments that it keeps in memory while it is open, leaf first; None while it is not open."""
    recomputed_segment: LiveSegment | None = None
    """A segment whose last token is computed again, for its logits."""
    added: bool = False
    """Whether it was added during the run. Idle segments are then evicted before it waits."""
    makes_segments: bool = False
    """Whether it belongs to a search, so that its samples become segments when they end."""
    min_confidence: float | None = None
    """A min_confidence that replaces that of its sampling parameters; None for theirs."""
    num_prefilled: int = 0
    """Tokens computed for it. Tokens that several requests need count for the first."""
    score: Score | None = None
    """The score of its prompt, once it is known, if requested in addition to samples."""

    @property
    def is_open(self) -> bool:
        """Whether its segments are in memory."""
        return self.opened is not None

    @property
    def num_rows(self) -> int:
        """Number of rows of its samples, at least 1."""
        # A request without samples (prefill only, scoring) counts as one row.
        return max(min(len(self.samples), self.spec.rows), 1)

    def row_pages(self, page_size: int) -> int:
        """Return how many pages one of its rows takes if it generates `max_tokens`."""
        segment = self.segment
        return row_pages(segment.base_below, segment.stop, self.spec.max_tokens, page_size)


class StateSpan(NamedTuple):
    """Slots of the states around consecutive tokens of a segment or row."""

    read_slot: int
    """Slot of the state before the first token."""
    penultimate_slot: int
    """Slot for the state before the last token; NO_STATE if it is not needed or exists."""
    write_slot: int
    """Slot for the state after the last token."""


class SegmentStates:
    """States of the segments of a model without recurrent layers: none, so no method has an effect.

    `treegen.engine.features.recurrent_states` has those of other models.
    """

    exist = False
    """Whether segments have states. If so, texts can be continued only where a state was kept."""

    def fits(self, depth: int, requests: Collection[LiveRequest]) -> bool:
        """Return whether each request alone has enough slots, at the end of `depth` segments."""
        return True

    def find_recompute_position(self, segment: LiveSegment) -> int:
        """Return from where a segment is computed again for the logits of its last token."""
        return segment.stop - 1

    def find_source(self, segment: LiveSegment, computed: int) -> LiveSegment | None:
        """Return the segment from whose end state a segment continues that is computed so far.

        Args:
            segment: The segment.
            computed: The position up to which it is computed.

        Returns:
            The segment above; None if the segment needs no state, or has one itself.
        """
        return None

    def allocate_recompute_slot(self, segment: LiveSegment, computed: int) -> None:
        """Allocate a slot to compute a segment again, if requests still read the state at its end.

        Args:
            segment: The segment.
            computed: The position from which it is computed.
        """

    def count_missing(self, segment: LiveSegment, computed: int) -> int:
        """Return how many slots a segment that counts as computed up to a position still needs."""
        return 0

    def allocate(self, segment: LiveSegment) -> None:
        """Allocate the missing slots of a segment."""

    def free(self, segment: LiveSegment) -> None:
        """Free the slots of a segment."""

    def span(self, segment: LiveSegment, start: int, stop: int) -> StateSpan | None:
        """Return the state slots for computing a part of a segment.

        Args:
            segment: The segment.
            start: Position of the first token.
            stop: Position after the last token.
        """
        return None

    def on_computed(self, segment: LiveSegment) -> None:
        """Free the slot in which a now complete segment was computed again."""

    def on_recompute_dropped(self, segment: LiveSegment) -> None:
        """Drop the running state of a segment that was computed again; its end state is valid."""

    def on_idle(self, segment: LiveSegment) -> None:
        """Free the end state of an incomplete segment, and store its running state there.

        Nothing reads the end state now.
        """

    def adopt(self, segment: LiveSegment, current: int, previous: int) -> None:
        """Take over the state slots of a row.

        Args:
            segment: The segment made of the row.
            current: Slot of the state at the position up to which the segment is computed.
            previous: Slot of the state one token earlier; NO_STATE for none.
        """

    def find_state_position(self, prefix: CachedPrefix, limit: int) -> int:
        """Return the last position up to `limit` where a cached prefix can be continued, or 0."""
        return limit

    def copy_from(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> None:
        """Copy the state of a cached prefix at a position into a segment.

        Args:
            prefix: The cached prefix.
            segment: The segment.
            covered: The position, which is within the segment.
        """

    def reset(self, cached: Slots) -> None:
        """Free all slots but those of cached prefixes."""
