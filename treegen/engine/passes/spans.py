"""Chooses what a prefill pass computes: pieces of segments, and tokens of resuming rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treegen.engine.passes.prefill_inputs import Span
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.store import SegmentStore

_KEY_BITS = 32  # low bits of a sort key: the sample index; high bits: the segment's index


def schedule_spans(
    run: EngineRun,
    queue: RowQueue,
    to_compute: Mapping[int, LiveSegment],
    room: int,
    max_logits: int,
) -> list[Span]:
    """Return the spans of the next pass, depth first.

    Args:
        run: Shared state of the run.
        queue: Has the resuming rows, whose tokens are computed again.
        to_compute: Segments by index; some may be computed already.
        room: Maximum number of tokens of the pass. A block of tokens that see each other is never
            cut, even if the pass then exceeds this number.
        max_logits: Maximum number of rows of logits of the pass.
    """
    spans: list[Span] = []
    reached: dict[int, int] = {}
    for slot, start in queue.resuming.items():
        if room == 0:
            break
        span = _row_span(run, queue, slot, start, room)
        spans.append(span)
        room -= len(span.tokens)
    logits = 0
    for index in sorted(to_compute):
        if room == 0 or logits >= max_logits:
            break
        segment = to_compute[index]
        if segment.computed < segment.stop and run.store.is_ready(segment, reached):
            span = _segment_span(run.store, segment, room, max_logits - logits)
            if len(span.tokens) > room and spans:
                continue
            spans.append(span)
            reached[index] = span.stop
            room = max(room - len(span.tokens), 0)
            logits += len(span.wanted)
    # Sort by the shared segments first. Then the spans below any segment are consecutive.
    return sorted(spans, key=lambda span: (span.chain, span.key))


def _row_span(run: EngineRun, queue: RowQueue, slot: int, start: int, room: int) -> Span:
    rows = run.rows
    segment = run.requests[int(rows.request[slot])].segment
    chain = rows.chain[slot]
    first = start - int(rows.stop[slot])
    last = min(int(rows.count[slot]) - 1, first + room)
    return Span(
        key=(segment.index << _KEY_BITS) + 1 + int(rows.sample[slot]),
        tokens=rows.generated.between(slot, first, last),
        start=start,
        table=rows.table[slot, : rows.num_pages[slot]],
        base=int(rows.base[slot]),
        chain=tuple(chain[chain >= 0].tolist()),
        wanted=np.empty(0, dtype=np.int64),
        slot=slot,
        shift=int(rows.shift[slot]),
        states=queue.states.span(slot, last - first) if queue.states is not None else None,
    )


def _segment_span(store: SegmentStore, segment: LiveSegment, room: int, max_logits: int) -> Span:
    store.tables.continue_parent(segment)
    start = segment.computed
    first_logit = max(start, segment.first_logit)
    stop = min(segment.stop, start + room, first_logit + max_logits)
    if store.blocks is not None:
        rest = segment.tokens[start - segment.start :]
        # Stop before a block that would be cut, or after it if the span begins with it.
        low, high = store.blocks.around(rest, stop - start)
        stop = start + (low or high)
    assert segment.table is not None
    return Span(
        key=segment.index << _KEY_BITS,
        tokens=segment.tokens[start - segment.start : stop - segment.start],
        start=start,
        table=segment.table,
        base=segment.base,
        chain=segment.above,
        wanted=np.arange(first_logit, stop),
        segment=segment,
        shift=store.shift_at(segment, start),
        states=store.states.span(segment, start, stop) if store.states is not None else None,
    )
