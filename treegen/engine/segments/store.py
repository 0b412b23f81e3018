"""The segments of a run: their page tables, references, and how far they are computed.

A segment gets pages when the first request that needs it is opened. Prefill passes compute it. It
is freed when nothing refers to it any more. When pages run out, an idle segment may be evicted: it
loses its pages, and is computed again when it is needed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treegen.common.params import SamplingParams
from treegen.engine.segments.page_tables import SegmentPageTables
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest, LiveSegment, SegmentStates
from treegen.ops.cache.pool import PagedCache, Pages
from treegen.ops.cache.state_cache import NO_STATE, Slots
from treegen.prompts.images.table import ImageTable, MRopePositions
from treegen.prompts.plan.cost_model import decide_cascade
from treegen.prompts.plan.plan import Plan
from treegen.prompts.radix import Tokens


class SegmentStore:
    """Segments of one run, by index, and their pages.

    Attributes:
        tables: Completes their page tables.
        states: Their recurrent states.
        rotary: Rotary positions of tokens; None if images shift no positions.
        blocks: Blocks of tokens that see each other, and so are computed in one pass; None without
            any.
    """

    def __init__(
        self,
        plan: Plan,
        cache: PagedCache,
        prefix_cache: PrefixCache,
        *,
        states: SegmentStates,
        images: ImageTable | None = None,
        rotary: MRopePositions | None = None,
    ) -> None:
        """Set up the segments of a plan, without pages and references.

        Args:
            plan: The plan.
            cache: The paged KV cache.
            prefix_cache: Prefixes whose pages stay between runs.
            states: Recurrent states of the segments.
            images: The model's images. Default: the model takes none.
            rotary: Rotary positions of tokens. Default: images shift no positions.
        """
        self.cache, self.states, self.rotary = cache, states, rotary
        self.blocks = images.blocks if images is not None else None
        self._images = images
        self.segments: dict[int, LiveSegment] = {}
        self._plan = plan
        self.tables = SegmentPageTables(cache, prefix_cache, self.states)
        self._idle: dict[int, LiveSegment] = {}  # idle segments in memory, longest idle first
        self._next_index = 0
        self.add_plan(plan)

    # Creating and releasing segments

    def add_plan(self, plan: Plan) -> list[LiveSegment]:
        """Add all segments of a plan."""
        live: list[LiveSegment] = []
        for segment in plan.segments:
            parent = live[segment.parent] if segment.parent >= 0 else None
            live.append(self.new(parent, segment.tokens, is_cascaded=segment.is_cascaded))
        self.tables.match_roots([segment for segment in live if segment.parent is None])
        return live

    def new(
        self, parent: LiveSegment | None, tokens: Tokens, *, is_cascaded: bool = False
    ) -> LiveSegment:
        """Create a segment, which lasts as long as a request or a segment below it needs it.

        Args:
            parent: The segment above it; None for a root.
            tokens: Its token ids.
            is_cascaded: Whether it gets an attention level of its own.
        """
        start = parent.stop if parent is not None else 0
        segment = LiveSegment(
            index=self._next_index,
            parent=parent,
            start=start,
            tokens=tokens,
            is_cascaded=is_cascaded,
            base=parent.base_below if parent is not None else 0,
            above=parent.chain if parent is not None else (),
            align=self._plan.align,
            computed=start,
            was_computed=start,
            shift=self.shift_after(parent) if parent is not None else 0,
            images=self._images.images_in([tokens]) if self._images is not None else (),
        )
        self._next_index += 1
        self.segments[segment.index] = segment
        if parent is not None:
            self.retain(parent).children[segment.index] = segment
        return segment

    def shift_after(self, segment: LiveSegment) -> int:
        """Return the shift of rotary positions after a segment's last token."""
        return self.shift_at(segment, segment.stop)

    def shift_at(self, segment: LiveSegment, position: int) -> int:
        """Return the shift of rotary positions at a position in a segment or above it."""
        if self.rotary is None:
            return 0
        first = next(above for above in segment.path() if above.start <= position)
        return self.rotary.after(first.tokens[: position - first.start], first.shift)

    def add(self, parent: LiveSegment | None, tokens: Tokens) -> LiveSegment:
        """Create a segment, with one reference for the caller."""
        segment = self.retain(self.new(parent, tokens))
        self.promote(segment, 1)
        self.tables.match_one(segment)
        return segment

    def adopt(
        self,
        parent: LiveSegment,
        tokens: Tokens,
        *,
        num_computed: int,
        table: Pages,
        base: int,
        above: tuple[int, ...],
        params: SamplingParams,
        states: tuple[int, int, int] | None = None,
    ) -> LiveSegment:
        """Create a segment of a row's generated tokens, with one reference for the caller.

        Args:
            parent: The segment below which the row was drawn.
            tokens: Token ids of the segment.
            num_computed: How many of the tokens have their keys in the pages; may be 0.
            table: The row's pages, which the segment takes over; may be empty.
            base: First position that `table` covers.
            above: Indices of the cascaded segments above `base`, root first.
            params: The sampling parameters of the row.
            states: For a model with recurrent layers, how many of the tokens a kept state has seen,
                the slot of that state and the slot of the state one token earlier. The segment
                takes over the slots.
        """
        segment = self.retain(self.new(parent, tokens))
        segment.params = params
        if len(table):
            segment.base, segment.above = base, above
            segment.table, segment.continued = table, True
            segment.computed = segment.was_computed = segment.start + num_computed
            if states is not None:
                num_seen, current, previous = states
                segment.computed = segment.start + num_seen
                if num_seen:
                    self.states.adopt(segment, current, previous)
            surplus = table[segment.num_pages(self.cache.page_size) :]
            if len(surplus):
                segment.table = table[: len(table) - len(surplus)]
                self.cache.pool.free(surplus)
            self._idle[segment.index] = segment
        return segment

    def view(self, segment: LiveSegment, cut: int, *, rows: int) -> LiveSegment:
        """Create a segment of the tokens up to a position, with one reference for the caller.

        It shares the segment's pages if their keys are computed. Otherwise, and if the model has
        recurrent layers, it is computed separately.

        Args:
            segment: The segment that has the tokens.
            cut: Position after the last token of the new segment.
            rows: Expected number of rows below it, for the choice of its level.
        """
        tokens = segment.tokens[: cut - segment.start]
        part = self.retain(self.new(segment.parent, tokens))
        part.base, part.above = segment.base, segment.above
        part.reuse = segment.reuse and (segment.reuse[0], min(segment.reuse[1], cut))
        is_shared = segment.continued or not segment.has_folded_parent
        # Within a segment no recurrent state is kept.
        is_shared = is_shared and not self.states.exist
        if segment.table is not None and segment.computed >= cut and is_shared:
            part.table = self.cache.pool.share(
                segment.table[: part.num_pages(self.cache.page_size)]
            )
            part.computed = part.was_computed = cut
            part.continued = True
            self._idle[part.index] = part
        self.promote(part, rows)
        return part

    def promote(self, segment: LiveSegment, rows: int) -> None:
        """Make a segment a cascaded one if that pays with `rows` rows below it.

        Segments and rows that are already below it still read it through their own pages.
        """
        plan = self._plan
        keys = segment.stop // plan.align * plan.align - segment.base
        if not segment.is_cascaded:
            is_root = segment.parent is None
            segment.is_cascaded, _ = decide_cascade(
                plan.sharing, rows, keys, plan.layer_bytes, plan.cost, root=is_root, live_rows=rows
            )

    def cascade_new(self, segment: LiveSegment) -> None:
        """Cascade an untouched segment, so that its pass can compute segments below it too.

        Segments below a folded segment wait for the pass that computes the folded one.
        """
        plan = self._plan
        can = not self.states.exist and plan.align == 1 and plan.sharing != "off"
        if can and segment.is_untouched:
            segment.is_cascaded = True

    def retain(self, segment: LiveSegment) -> LiveSegment:
        """Add one reference to a segment, and return the segment."""
        segment.refs += 1
        return segment

    def release(self, segment: LiveSegment | None) -> None:
        """Drop one reference. Free the segment, and those above, if nothing refers to them."""
        while segment is not None:
            segment.refs -= 1
            if segment.refs > 0:
                return
            self._free(segment)
            del self.segments[segment.index]
            if segment.parent is not None:
                del segment.parent.children[segment.index]
            segment = segment.parent

    # Requests

    def attach(self, request: LiveRequest) -> None:
        """Attach a new request to its segment, and record the positions whose logits it needs."""
        segment = self.retain(request.segment)
        segment.requests[request] = None
        if request.spec.rows:
            segment.first_logit = min(segment.first_logit, segment.stop - 1)
        if request.spec.score_from is not None:
            first = request.spec.score_from - 1
            for above in segment.path():
                if first >= above.stop:
                    break
                above.scored = min(above.scored, first)
                above.top = max(above.top, request.spec.top)
                above.first_logit = min(above.first_logit, first)

    def keys_of(self, index: int) -> tuple[Pages, int, int]:
        """Return page table, number of keys and first position of a cascaded segment."""
        segment = self.segments[index]
        assert segment.table is not None
        return segment.table, segment.base_below - segment.base, segment.base

    def pages_to_open(self, request: LiveRequest) -> int:
        """Return the maximum number of pages that opening a request takes."""
        return sum(s.missing_pages(self.cache.page_size) for s in self._list_required(request))

    def slots_to_open(self, request: LiveRequest) -> int:
        """Return the maximum number of recurrent state slots that opening a request takes."""
        if not self.states.exist:
            return 0
        return sum(
            self.states.count_missing(segment, self._get_computed_for(request, segment))
            for segment in self._list_required(request)
        )

    def open(self, request: LiveRequest) -> tuple[list[LiveSegment], int]:
        """Allocate the pages of every segment that a request needs.

        Returns:
            The segments that are not computed yet, root first, and how many tokens cached prefixes
            supplied.
        """
        request.opened = self._list_required(request)
        reused = 0
        to_compute = []
        recomputed = request.recomputed_segment
        if recomputed is not None and recomputed in request.opened:
            start = self._get_computed_for(request, recomputed)
            self.states.allocate_recompute_slot(recomputed, start)
            is_whole = recomputed.computed == recomputed.stop
            recomputed.is_recomputing |= (
                is_whole and start < recomputed.stop and bool(recomputed.openers)
            )
            recomputed.computed = start
        for segment in reversed(request.opened):
            segment.openers[request] = None
            self._idle.pop(segment.index, None)
            reused += self.tables.allocate(segment)
            if segment.computed < segment.stop:
                to_compute.append(segment)
        return to_compute, reused

    def _get_computed_for(self, request: LiveRequest, segment: LiveSegment) -> int:
        """Return up to where a segment counts as computed for a request.

        A segment that must give logits again counts as computed only up to their position.
        """
        if segment is not request.recomputed_segment:
            return segment.computed
        return min(segment.computed, self.states.find_recompute_position(segment))

    def _list_required(self, request: LiveRequest) -> list[LiveSegment]:
        """Return the segments that must be in memory for a request's segment, leaf first."""
        segment, needed = request.segment, []
        while True:
            needed.append(segment)
            source = self.states.find_source(segment, self._get_computed_for(request, segment))
            if source is not None:
                segment = source
            elif segment.has_folded_parent and not segment.continued:
                assert segment.parent is not None
                segment = segment.parent
            elif segment.above:
                segment = self.segments[segment.above[-1]]
            else:
                return needed

    def is_ready(self, segment: LiveSegment, reached: dict[int, int]) -> bool:
        """Return whether a segment can be computed in the next pass.

        A cascaded segment above may be computed in the same pass, because a layer writes all keys
        before it attends. A folded parent must be computed in an earlier pass, because its last
        page is copied first. The segment from whose recurrent state this one continues may be
        computed in the same pass, because a layer computes the sequences above first.

        Args:
            segment: The segment.
            reached: The positions up to which this pass computes other segments, by index.
        """
        source = self.states.find_source(segment, segment.computed)
        if source is not None and reached.get(source.index, source.computed) != source.stop:
            return False
        if segment.has_folded_parent and not segment.continued:
            assert segment.parent is not None
            return segment.parent.computed == segment.start
        if not segment.above:
            return True
        above = self.segments[segment.above[-1]]
        return reached.get(above.index, above.computed) == above.stop

    def count_repeatable(self, segment: LiveSegment, reached: dict[int, int]) -> int | None:
        """Return how many tokens before a segment it has to repeat to be in its parent's pass.

        It then computes the last tokens of its folded parent itself instead of copying them. So a
        chain of short segments does not need a pass for each of them.

        Args:
            segment: The segment.
            reached: As for `is_ready`.

        Returns:
            The number; None if the segment has to wait, or if no segment waits for it.
        """
        parent = segment.parent
        is_in_pass = parent is not None and reached.get(parent.index) == segment.start
        if not is_in_pass or segment.continued or self.states.exist or self.blocks is not None:
            return None
        is_awaited = any(c.openers and c.computed < c.stop for c in segment.children.values())
        if self._plan.align > 1 or not is_awaited:
            return None
        return (segment.start - segment.base) % self.cache.page_size

    def close(self, request: LiveRequest) -> list[LiveSegment]:
        """Undo `open`, if the request is open; return segments that need not be computed now."""
        not_needed = []
        for segment in request.opened or ():
            del segment.openers[request]
            if not segment.openers:
                not_needed.append(segment)
                segment.is_recomputing = False
                self._idle[segment.index] = segment
                self.states.on_idle(segment)
            elif segment.is_recomputing and all(
                r.recomputed_segment is not segment for r in segment.openers
            ):
                # It is complete for the remaining requests. They may not keep the segments in
                # memory that are needed to compute it again.
                not_needed.append(segment)
                segment.mark_computed(segment.stop)
                self.states.on_recompute_dropped(segment)
        request.opened = None
        return not_needed

    def evict_idle(self, keep: LiveRequest | None = None) -> bool:
        """Free the pages of an idle segment that request `keep` does not need. False if none.

        Segments with a child in memory stay. Of the remaining ones, the one that has been idle for
        longest is evicted, preferably one for which no request waits.
        """
        needed = self._list_required(keep) if keep is not None else []
        awaited = None
        for segment in self._idle.values():
            if segment in needed or any(c.table is not None for c in segment.children.values()):
                continue
            if not segment.requests:
                self._free(segment)
                return True
            awaited = awaited or segment
        if awaited is not None:
            self._free(awaited)
        return awaited is not None

    def free_idle(self) -> None:
        """Free the pages of all segments that no open request needs."""
        for segment in list(self._idle.values()):
            self._free(segment)

    def _free(self, segment: LiveSegment) -> None:
        if segment.table is None:
            return
        del self._idle[segment.index]
        self.cache.pool.end_loan(segment.index)  # pages of its expanded keys, if it has any
        self.cache.pool.free(segment.table)
        segment.table = None
        self.states.free(segment)
        segment.computed, segment.continued = segment.start, False

    def clear(self) -> None:
        """Drop all page tables; the caller has freed their pages."""
        self._idle.clear()
        for segment in self.segments.values():
            segment.table = None
            segment.end_state = segment.penultimate_state = NO_STATE

    def check(self) -> None:
        """Assert that the flags of every segment agree with its pages and its open requests."""
        for segment in self.segments.values():
            in_memory, is_open = segment.table is not None, bool(segment.openers)
            name = f"segment {segment.index}"
            assert in_memory or not is_open, f"{name} is open without pages"
            is_idle = self._idle.get(segment.index) is segment
            assert is_idle == (in_memory and not is_open), f"{name} is not idle, or not in the list"
            assert in_memory or not segment.continued, f"{name} has no pages to continue in"
            assert is_open or not segment.is_recomputing, f"{name} is computed for no request"

    def iter_page_tables(self) -> Iterator[Pages]:
        """Return all page tables, for the pool's check."""
        return (s.table for s in self.segments.values() if s.table is not None)

    def owned_states(self) -> Slots:
        """Return all recurrent state slots of segments, for the state cache's check."""
        slots = [
            slot for s in self.segments.values() for slot in (s.end_state, s.penultimate_state)
        ]
        return np.array(slots, dtype=np.int64)
