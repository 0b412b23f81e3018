"""Prefill passes: launches them, and draws the first tokens of samples from their logits.

After an update of the weights, shared segments are computed again in their pages, while the rows
below keep their own keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import AsyncHostCopy, to_device_together
from treegen.engine.compute.levels import Ints
from treegen.engine.features import Features
from treegen.engine.passes.decode import InFlightStep
from treegen.engine.passes.pass_inputs import Span, build_prompt_histories, prefill_inputs
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.segments.scores import (
    PendingScores,
    TokensToScore,
    score_tokens,
    tokens_to_score,
)
from treegen.engine.segments.segment import LiveRequest, LiveSegment, StateSpan
from treegen.engine.segments.store import SegmentStore
from treegen.model.memory import max_prefill_logits
from treegen.ops.cache.pool import table_slots
from treegen.ops.cache.state_cache import NO_STATE
from treegen.ops.sampling.draw import AsyncDraws, draw

_MAX_WAITING_LEVELS = 8  # beyond this number of passes, segments repeat tokens of their parents
_KEY_BITS = 32  # low bits of a sort key: the sample index; high bits: the segment's index


def schedule_spans(
    run: EngineRun,
    queue: RowQueue,
    to_compute: Mapping[int, LiveSegment],
    token_budget: int,
    max_logits: int,
) -> list[Span]:
    """Return the spans of the next pass, depth first.

    Args:
        run: Shared state of the run.
        queue: Has the resuming rows, whose tokens are computed again.
        to_compute: Segments by index; some may be computed already.
        token_budget: Maximum number of tokens of the pass. A block of tokens that see each other is
            never cut, even if the pass then exceeds this number.
        max_logits: Maximum number of rows of logits of the pass.
    """
    spans: list[Span] = []
    reached: dict[int, int] = {}
    for slot, start in queue.resuming.items():
        if token_budget == 0:
            break
        span = _build_row_span(run, queue, slot, start, token_budget)
        spans.append(span)
        token_budget -= len(span.tokens)
    logits = num_repeated = 0
    is_deep: bool | None = None  # counted once a segment has to wait
    depths: dict[int, int] = {}  # how many segments above it this pass computes, for each segment
    for index in sorted(to_compute):
        if token_budget == 0 or logits >= max_logits:
            break
        segment, store = to_compute[index], run.store
        if segment.computed == segment.stop:
            continue
        depth = depths.get(segment.parent.index, -1) + 1 if segment.parent is not None else 0
        repeated = 0
        if not store.is_ready(segment, reached):
            if is_deep is None:
                is_deep = _count_waiting_levels(to_compute) > _MAX_WAITING_LEVELS
            needed = store.count_repeatable(segment, reached) if is_deep else None
            # A pass repeats less than a page for each level that it computes ahead of time.
            max_repeated = min(token_budget, depth * store.cache.page_size - num_repeated) - 1
            if needed is None or needed > max_repeated:
                continue
            repeated = needed
        span = _build_segment_span(store, segment, repeated, token_budget, max_logits - logits)
        if len(span.tokens) > token_budget and spans:
            continue
        spans.append(span)
        reached[index], depths[index] = span.stop, depth
        num_repeated += repeated
        token_budget = max(token_budget - len(span.tokens), 0)
        logits += len(span.logit_positions)
    # Sort by the shared segments first. Then the spans below any segment are consecutive.
    return sorted(spans, key=lambda span: (span.chain, span.key))


def _count_waiting_levels(to_compute: Mapping[int, LiveSegment]) -> int:
    """Return for how many passes some segment waits if each waits for that of its folded parent."""
    levels: dict[int, int] = {}
    for index, segment in sorted(to_compute.items()):
        parent = segment.parent
        if parent is not None and segment.has_folded_parent and parent.computed < parent.stop:
            levels[index] = levels.get(parent.index, 0) + 1
    return max(levels.values(), default=0)


def _build_row_span(
    run: EngineRun, queue: RowQueue, slot: int, start: int, token_budget: int
) -> Span:
    rows = run.rows
    segment = run.requests[int(rows.request[slot])].segment
    chain = rows.chain[slot]
    first = start - int(rows.stop[slot])
    last = min(int(rows.count[slot]) - 1, first + token_budget)
    return Span(
        key=(segment.index << _KEY_BITS) + 1 + int(rows.sample[slot]),
        tokens=rows.generated.between(slot, first, last),
        start=start,
        table=rows.table[slot, : rows.num_pages[slot]],
        base=int(rows.base[slot]),
        chain=tuple(chain[chain >= 0].tolist()),
        logit_positions=np.empty(0, dtype=np.int64),
        slot=slot,
        shift=int(rows.shift[slot]),
        states=queue.states.span(slot, last - first),
    )


def _build_segment_span(
    store: SegmentStore, segment: LiveSegment, repeated: int, token_budget: int, max_logits: int
) -> Span:
    """Return the next span of a segment.

    Args:
        store: The segments.
        segment: The segment.
        repeated: Number of tokens of its parent that are computed again at the start of the span.
        token_budget: As for `schedule_spans`.
        max_logits: As for `schedule_spans`.
    """
    if repeated:
        segment.continued = True
    else:
        store.tables.continue_parent(segment)
    start = segment.computed - repeated
    first_logit = max(segment.computed, segment.first_logit)
    stop = min(segment.stop, start + token_budget, first_logit + max_logits)
    tokens = segment.path_tokens(start)
    if store.blocks is not None:
        # Stop before a block that would be cut, or after it if the span begins with it.
        low, high = store.blocks.around(tokens, stop - start)
        stop = start + (low or high)
    assert segment.table is not None
    return Span(
        key=segment.index << _KEY_BITS,
        tokens=tokens[: stop - start],
        start=start,
        table=segment.table,
        base=segment.base,
        chain=segment.above,
        logit_positions=np.arange(first_logit, stop),
        segment=segment,
        shift=store.shift_at(segment, start),
        states=store.states.span(segment, start, stop),
    )


_MIN_LOGIT_ROWS = 16  # rows of logits that a pass may have for any vocabulary size


@dataclass(frozen=True, slots=True)
class FirstDraws:
    """The first tokens of the rows of requests that have equally many rows."""

    requests: Sequence[LiveRequest]
    """The requests."""
    at: Ints
    """For each request, the row of the pass's logits from which its tokens are drawn."""
    flight: InFlightStep
    """The draws."""


@dataclass(frozen=True, slots=True)
class InFlightPrefill:
    """A prefill pass that may still be running."""

    spans: Sequence[Span]
    """The spans of tokens that it computes."""
    lse: AsyncHostCopy | None
    """Log-sum-exp of each row of logits; None if `first` draws from all rows."""
    scored: Sequence[PendingScores]
    """Scores of tokens of segments."""
    first: Sequence[FirstDraws]
    """Draws of first tokens."""

    def wait(self) -> NDArray[np.float32]:
        """Wait for the pass; return the log-sum-exp of each row of logits."""
        if self.lse is not None:
            (lse,) = self.lse.wait()
            return lse
        lse = np.empty(sum(len(span.logit_positions) for span in self.spans), dtype=np.float32)
        for first in self.first:
            lse[first.at] = first.flight.fetch.wait().lse
        return lse

    def iter_finished_segments(self) -> Iterator[LiveSegment]:
        """Yield the segments whose last token the pass computes."""
        for span in self.spans:
            if span.segment is not None and span.stop == span.segment.stop:
                yield span.segment

    def describe_row(self, at: int) -> str:
        """Return the prompt and token of row `at` of the logits, for an error message."""
        for span in self.spans:
            if at < len(span.logit_positions):
                below = next(iter(span.segment.requests), None) if span.segment else None
                name = f"prompt {below.spec.id!r}" if below else "a shared prompt"
                return f"{name} at token {int(span.logit_positions[at])}"
            at -= len(span.logit_positions)
        raise AssertionError("a row of logits belongs to no span")


class PrefillPasses:
    """Launches the prefill passes of one run."""

    def __init__(self, run: EngineRun, queue: RowQueue, features: Features, *, chunk: int) -> None:
        """Set up the prefill passes of one run.

        Args:
            run: Shared state of the run.
            queue: Its rows.
            features: Its optional features.
            chunk: Maximum number of tokens of a pass.
        """
        self._run, self._queue, self._features = run, queue, features
        self._chunk = chunk
        vocab_size = max(len(run.param_sets[0].stopping.may_end), 1)
        max_logits = max_prefill_logits(run.model.device)
        self._max_logits = max(max_logits // vocab_size, _MIN_LOGIT_ROWS)

    def launch(self, to_compute: Mapping[int, LiveSegment]) -> InFlightPrefill:
        """Launch a pass over segments, given by index, and over tokens of resuming rows."""
        run, usage = self._run, self._run.usage
        spans = schedule_spans(run, self._queue, to_compute, self._chunk, self._max_logits)
        inputs = prefill_inputs(run, spans)
        if self._features.images is not None:
            inputs = self._features.images.add_embeddings(inputs, usage)
        logits, levels = run.model_runner.prefill(inputs)
        usage.impl = levels.impl
        usage.prefill_steps += 1
        prompts: list[tuple[LiveRequest, int]] = []
        to_score: list[TokensToScore] = []
        offset = 0
        resumed: list[int] = []
        for span in spans:
            end = offset + len(span.logit_positions)
            if span.segment is None:
                resumed += self._on_row(span)
            else:
                prompts += [(request, end - 1) for request in self._on_segment(span, span.segment)]
                if span.segment.scored < span.stop:
                    to_score += tokens_to_score(span.segment, span.logit_positions, offset)
            offset = end
        if resumed:
            self._queue.start_decoding(np.array(resumed, dtype=np.int64))
        lse: AsyncHostCopy | None = None
        scored: list[PendingScores] = []
        if not prompts or to_score or len({at for _, at in prompts}) < len(logits):
            lse, scored = score_tokens(to_score, logits)
        return InFlightPrefill(spans, lse, scored, self._draw_first(prompts, logits))

    def _on_row(self, span: Span) -> list[int]:
        """Count a row's recomputed tokens; return its slot once the last one is computed."""
        run, rows, slot = self._run, self._run.rows, span.slot
        run.usage.recomputed_tokens += len(span.tokens)
        run.requests[int(rows.request[slot])].num_prefilled += len(span.tokens)
        self._queue.resuming[slot] = span.stop
        is_whole = span.stop >= rows.stop[slot] + rows.count[slot] - 1
        return [slot] if is_whole else []

    def _on_segment(self, span: Span, segment: LiveSegment) -> list[LiveRequest]:
        """Count a computed piece of a segment; return the requests to draw first tokens for."""
        usage = self._run.usage
        again = max(min(span.stop, segment.was_computed) - span.start, 0)
        usage.recomputed_tokens += again
        usage.prompt_tokens_computed += len(span.tokens) - again
        segment.mark_computed(span.stop)
        next(iter(segment.openers)).num_prefilled += len(span.tokens)
        if span.stop < segment.stop:
            return []
        self._run.store.states.on_computed(segment)
        return [r for r in segment.requests if r.samples and r.slots is None]

    def _draw_first(
        self, prompts: Sequence[tuple[LiveRequest, int]], logits_SV: Tensor
    ) -> list[FirstDraws]:
        """Draw the first tokens of all samples of requests from their prompts' last logits.

        Args:
            prompts: Each request, and the row of the logits from which its first tokens are drawn.
            logits_SV: Logits of the pass, [S, vocabulary].
        """
        by_rows: dict[int, list[tuple[LiveRequest, int]]] = {}
        for request, row in prompts:
            by_rows.setdefault(request.num_rows, []).append((request, row))
        first_draws: list[FirstDraws] = []
        for num_rows, group in by_rows.items():
            requests = [request for request, _ in group]
            slots_PN = self._queue.add(requests, num_rows)
            seeds = self._run.rows.seed[slots_PN]
            at = np.array([row for _, row in group])
            arrays = [at, seeds, np.zeros_like(seeds)]
            masks = self._features.grammars.begin(requests, slots_PN)
            self._features.budgets.drop_within_grammars(requests, slots_PN)
            forced = self._features.budgets.get_first_forced_tokens(slots_PN)
            if forced is not None:
                arrays.append(forced)
            at_P, seeds_PN, steps_PN, *forced_arrays = to_device_together(arrays, logits_SV.device)
            forced_P = forced_arrays[0] if forced_arrays else None
            sampling = self._run.sampling_of(np.array([request.params for request in requests]))
            texts = None
            if sampling.penalties is not None:
                texts = build_prompt_histories(self._run, requests)
            if masks is not None:
                sampling = replace(sampling, masked=True)
            draws = draw(logits_SV[at_P], seeds_PN, steps_PN, sampling, forced_P, texts, masks)
            slots = slots_PN.ravel()
            flight = InFlightStep(
                slots,
                self._run.rows.serial[slots],
                AsyncDraws(draws),
                version=self._run.gate.version,
            )
            first_draws.append(FirstDraws(requests, at, flight))
        return first_draws


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
        remaining = {segment: _start_recomputing(run, segment) for segment in group}
        while remaining:
            _recompute_pass(run, features, remaining, chunk)
    _copy_to_rows(run, queue)


def _start_recomputing(run: EngineRun, segment: LiveSegment) -> tuple[int, int]:
    """Return the position from which a segment is computed again, and the slot of the state there.

    The tokens of folded segments above that only this segment has are computed again too.
    """
    assert segment.table is not None and segment.computed == segment.stop
    store, size, parent = run.store, run.cache.page_size, segment.parent
    start = segment.base
    shared = max(segment.start - segment.base, 0) // size
    if parent is not None and parent.table is not None:
        same_pages = np.array_equal(parent.table[:shared], segment.table[:shared])
        if not segment.has_folded_parent or (parent.base == segment.base and same_pages):
            start = segment.start
            segment.continued = False
            store.tables.continue_parent(segment)
    read_slot = NO_STATE
    if start == segment.start:
        read_slot = parent.end_state if parent is not None else NO_STATE
    elif segment.above:
        read_slot = store.segments[segment.above[-1]].end_state
    is_known = read_slot != NO_STATE or start == 0 or not store.states.exist
    assert is_known, "a segment above has no state"
    return start, read_slot


def _recompute_pass(
    run: EngineRun,
    features: Features,
    remaining: dict[LiveSegment, tuple[int, int]],
    token_budget: int,
) -> None:
    """Compute a pass, and update what remains of segments.

    Args:
        run: Shared state of the run.
        features: Its optional features.
        remaining: The position from which each segment is still to be computed, and the slot of the
            state there.
        token_budget: Maximum number of tokens of the pass.
    """
    spans: list[Span] = []
    for segment, (start, read_slot) in list(remaining.items()):
        if not token_budget:
            break
        span = _build_recompute_span(run.store, segment, start, read_slot, token_budget)
        # A block that is never cut may exceed the budget, but only in a pass of its own.
        if spans and len(span.tokens) > token_budget:
            continue
        spans.append(span)
        token_budget = max(token_budget - len(span.tokens), 0)
        if span.stop == segment.stop:
            del remaining[segment]
        else:
            remaining[segment] = span.stop, span.states.write_slot if span.states else NO_STATE
    spans.sort(key=lambda span: (span.chain, span.key))
    inputs = prefill_inputs(run, spans)
    if features.images is not None:
        inputs = features.images.add_embeddings(inputs, run.usage)
    run.model_runner.prefill(inputs)
    run.usage.prefill_steps += 1
    run.usage.recomputed_tokens += len(inputs.tokens)


def _build_recompute_span(
    store: SegmentStore, segment: LiveSegment, start: int, read_slot: int, token_budget: int
) -> Span:
    """Return a span of a segment that is computed again, without logits.

    Args:
        store: The segments.
        segment: The segment.
        start: Position of the first token.
        read_slot: Slot of the state there.
        token_budget: Maximum number of tokens, which a block that is never cut may exceed.
    """
    tokens = segment.path_tokens(start)
    num = min(token_budget, len(tokens))
    if store.blocks is not None:
        low, high = store.blocks.around(tokens, num)
        num = low or high
    states = None
    if store.states.exist:
        # A state that is kept before the last token is the running state until then.
        states = StateSpan(read_slot, NO_STATE, segment.penultimate_state or segment.end_state)
        if num == len(tokens):
            penultimate_slot = segment.penultimate_state if num > 1 else NO_STATE
            states = StateSpan(read_slot, penultimate_slot, segment.end_state)
    assert segment.table is not None
    return Span(
        key=segment.index,
        tokens=tokens[:num],
        start=start,
        table=segment.table,
        base=segment.base,
        chain=segment.above,
        logit_positions=np.empty(0, dtype=np.int64),
        segment=segment,
        shift=store.shift_at(segment, start),
        states=states,
    )


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
