"""Computes shared segments again in their pages, while the rows below keep their own keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from treegen.engine.features import Features
from treegen.engine.passes.pass_inputs import Span, prefill_inputs
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.segments.segment import LiveSegment, StateSpan
from treegen.ops.cache.pool import table_slots
from treegen.ops.cache.state_cache import NO_STATE


def recompute_segments(run: EngineRun, queue: RowQueue, features: Features, chunk: int) -> None:
    """Compute the segments above active rows again, in place.

    All segments in memory must be complete, and have active rows below them.

    Args:
        run: Shared state of the run.
        queue: Its rows.
        features: Its optional features.
        chunk: Maximum number of tokens of a pass.
    """
    segments = [segment for segment in run.store.segments.values() if segment.table is not None]
    queue.states.leave_segments(queue.active(), segments)
    depths = {segment.index: sum(1 for _ in segment.path()) for segment in segments}
    segments.sort(key=lambda segment: (depths[segment.index], segment.index))
    for _, group in groupby(segments, key=lambda segment: depths[segment.index]):
        spans = [_span(run, segment) for segment in group]
        while spans:
            spans = _compute_some(run, features, spans, chunk)
    _copy_to_rows(run, queue)


def _span(run: EngineRun, segment: LiveSegment) -> Span:
    """Return the tokens of a segment, and those of folded segments above that only it has."""
    assert segment.table is not None and segment.computed == segment.stop
    store, size, parent = run.store, run.cache.page_size, segment.parent
    start = segment.base
    shared = max(segment.start - segment.base, 0) // size
    if parent is not None and parent.table is not None:
        same_pages = np.array_equal(parent.table[:shared], segment.table[:shared])
        if not segment.reads_on or (parent.base == segment.base and same_pages):
            start = segment.start
            segment.continued = False
            store.tables.continue_parent(segment)
    # A table may begin within a segment above.
    first = next(above for above in segment.path() if above.start <= start)
    states = None
    if store.states.exist:
        reads = NO_STATE
        if start == segment.start:
            reads = parent.end_state if parent is not None else NO_STATE
        elif segment.above:
            reads = store.segments[segment.above[-1]].end_state
        assert reads != NO_STATE or start == 0, "a state above is not in place"
        states = StateSpan(reads, segment.last_state, segment.end_state)
    return Span(
        key=segment.index,
        tokens=segment.path_tokens()[start:],
        start=start,
        table=segment.table,
        base=segment.base,
        chain=segment.above,
        wanted=np.empty(0, dtype=np.int64),
        segment=segment,
        shift=store.shift_at(first, start),
        states=states,
    )


def _compute_some(run: EngineRun, features: Features, spans: list[Span], chunk: int) -> list[Span]:
    """Compute a pass of spans; return what is left of them."""
    room = chunk
    now: list[Span] = []
    later: list[Span] = []
    for span in spans:
        part, rest = _cut(run, span, room) if room else (None, span)
        if part is not None and now and len(part.tokens) > room:  # a block that is never cut
            part, rest = None, span
        if part is not None:
            now.append(part)
            room = max(room - len(part.tokens), 0)
        if rest is not None:
            later.append(rest)
    now.sort(key=lambda span: (span.chain, span.key))
    inputs = prefill_inputs(run, now)
    if features.images is not None:
        inputs = features.images.add_embeddings(inputs, run.usage)
    run.executor.prefill(inputs)
    run.usage.prefill_steps += 1
    run.usage.recomputed_tokens += len(inputs.tokens)
    return later


def _cut(run: EngineRun, span: Span, room: int) -> tuple[Span, Span | None]:
    """Return the first part of a span, which fits into a pass, and the rest."""
    num = min(room, len(span.tokens))
    if run.store.blocks is not None:
        low, high = run.store.blocks.around(span.tokens, num)
        num = low or high
    if num == len(span.tokens):
        return span, None
    rotary, states, rest_states = run.store.rotary, span.states, span.states
    if states is not None:
        reads, leaves, writes = states
        # A state that is kept before the last token is the running state until then.
        running = writes if leaves == NO_STATE else leaves
        states = StateSpan(reads, NO_STATE, running)
        left = len(span.tokens) - num
        rest_states = StateSpan(running, leaves if left > 1 else NO_STATE, writes)
    shift = span.shift if rotary is None else rotary.after(span.tokens[:num], span.shift)
    part = replace(span, tokens=span.tokens[:num], states=states)
    rest = replace(
        span,
        tokens=span.tokens[num:],
        start=span.start + num,
        shift=shift,
        states=rest_states,
    )
    return part, rest


def _copy_to_rows(run: EngineRun, queue: RowQueue) -> None:
    """Copy the tokens of prompts that do not fill a page into the first pages of active rows."""
    rows, size = run.rows, run.cache.page_size
    sources, targets = [], []
    for slot in queue.active().tolist():
        segment = run.requests[int(rows.request[slot])].segment
        base, stop = int(rows.base[slot]), int(rows.stop[slot])
        first = stop - (stop - base) % size
        if first < stop:
            assert segment.table is not None
            table = rows.table[slot]
            sources.append(
                table_slots(segment.table, first - segment.base, stop - segment.base, size)
            )
            targets.append(table_slots(table, first - base, stop - base, size))
    if sources:
        run.cache.copy_tokens(np.concatenate(sources), np.concatenate(targets))
