"""Builds the inputs of a prefill pass, and the inputs of sampling in addition to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints, build_shared_levels, make_level, pad_tables
from treegen.engine.compute.model_runner import PrefillInputs, StepRows
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.segments.segment import NEVER, LiveRequest, LiveSegment, StateSpan
from treegen.model.recurrent.state_batch import Piece
from treegen.ops.attention import HostLevel
from treegen.ops.cache.pool import Pages
from treegen.ops.cache.state_cache import NO_STATE
from treegen.ops.sampling.token_history import TokenHistory
from treegen.prompts.images.table import BidirectionalBlocks
from treegen.prompts.radix import Tokens

_MIN_LEVEL_KEYS = 512  # minimum number of keys for which a level of their own pays in a pass


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one segment or row, computed in one prefill pass."""

    key: int
    """Sort key for depth-first order."""
    tokens: Tokens
    """The token ids."""
    start: int
    """Position of the first token."""
    table: Pages
    """The pages for their keys and values."""
    base: int
    """Position of the first key in these pages."""
    chain: tuple[int, ...]
    """Indices of the cascaded segments above the tokens, root first."""
    logit_positions: Ints
    """Positions whose logits are needed."""
    segment: LiveSegment | None = None
    """The segment of the tokens; None if they belong to a row."""
    slot: int = -1
    """The slot of the row; -1 if the tokens belong to a segment."""
    shift: int = 0
    """Shift of rotary positions at the first token; see `MRopePositions`."""
    states: StateSpan | None = None
    """Slots of the recurrent states before and after the tokens; None for a model without recurrent
    layers."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


def prefill_inputs(run: EngineRun, spans: Sequence[Span]) -> PrefillInputs:
    """Build the inputs of a pass that computes spans, in their order."""
    cache = run.cache
    lengths = np.array([len(span.tokens) for span in spans])
    offsets = np.concatenate([[0], lengths.cumsum()])
    positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    pages = pad_tables([span.table for span in spans])
    base = np.array([span.base for span in spans])
    logit_indices = np.concatenate(
        [
            span.logit_positions - span.start + offset
            for span, offset in zip(spans, offsets, strict=False)
        ]
    )
    item = np.repeat(np.arange(len(spans)), lengths)
    chains = pad_tables([span.chain for span in spans], fill=-1)
    above = build_shared_levels(chains, offsets, run.store.keys_of)

    def levels(blocks: BidirectionalBlocks | None) -> list[HostLevel]:
        runs = _split_into_runs(spans, offsets, blocks)
        return [*above, *_build_own_levels(spans, runs, pages, base, cache.page_size)]

    blocks = run.store.blocks
    if blocks is not None and not any(blocks.of(span.tokens) for span in spans):
        blocks = None
    tokens = np.concatenate([span.tokens for span in spans]).astype(np.int64)
    slots = compute_slot_mapping(pages[item], positions - base[item], cache.page_size)
    return PrefillInputs(
        tokens=tokens,
        positions=positions,
        slots=slots,
        logit_indices=logit_indices.astype(np.int64),
        levels=levels(None if blocks is None or blocks.windowed else blocks),
        windowed=levels(blocks) if blocks is not None and blocks.windowed else None,
        pieces=_build_pieces(spans, offsets) if run.store.states.exist else None,
        rotary=_build_mrope_positions(run, spans),
    )


def _build_mrope_positions(run: EngineRun, spans: Sequence[Span]) -> Ints | None:
    """Return the rotary positions of tokens, [3, tokens]; None if they equal the positions."""
    rotary = run.store.rotary
    if rotary is None or all(rotary.is_plain(span.tokens, span.shift) for span in spans):
        return None
    return np.concatenate(
        [rotary.positions(span.tokens, span.start, span.shift) for span in spans], axis=1
    )


def _build_pieces(spans: Sequence[Span], offsets: Ints) -> list[Piece]:
    """Return the pieces of spans between recurrent states that are read or written."""
    pieces: list[Piece] = []
    for span, start in zip(spans, offsets.tolist(), strict=False):
        assert span.states is not None
        num, (read_slot, penultimate_slot, write_slot) = len(span.tokens), span.states
        if penultimate_slot != NO_STATE:
            pieces.append(Piece(start, num - 1, read_slot, penultimate_slot))
            start, num, read_slot = start + num - 1, 1, penultimate_slot
        pieces.append(Piece(start, num, read_slot, write_slot))
    return pieces


class _VisibleRuns(NamedTuple):
    """Runs of rows that see the keys of their span, either causally or as a block.

    A row of a causal run sees keys up to its own. A row of a block sees all keys up to the last
    row's.
    """

    span: Ints
    """Index of the span of each run."""
    start: Ints
    """Its first row in the pass."""
    stop: Ints
    """The row after its last row in the pass."""
    end: Ints
    """The position after its last row."""
    is_block: NDArray[np.bool_]
    """Whether all of its rows see each other."""


def _split_into_runs(
    spans: Sequence[Span], offsets: Ints, blocks: BidirectionalBlocks | None
) -> _VisibleRuns:
    """Split the rows of each span into runs: blocks, and the causal rows between them."""
    runs: list[tuple[int, int, int, int, bool]] = []
    for index, (span, offset) in enumerate(zip(spans, offsets.tolist(), strict=False)):
        begin, num = 0, len(span.tokens)
        inside = blocks.of(span.tokens) if blocks is not None else []
        for low, high in [*inside, (num, num)]:
            for start, end, is_block in ((begin, low, False), (low, high, True)):
                if start < end:
                    runs.append((index, offset + start, offset + end, span.start + end, is_block))
            begin = high
    columns = (np.array(column) for column in zip(*runs, strict=True))
    span_R, start_R, stop_R, end_R, is_block_R = columns
    return _VisibleRuns(span_R, start_R, stop_R, end_R, is_block_R)


def _build_own_levels(
    spans: Sequence[Span], runs: _VisibleRuns, pages: Pages, base: Ints, page_size: int
) -> list[HostLevel]:
    """Return the levels of the spans' own page tables; a single span gets one for earlier keys.

    A long document is computed in several passes. All rows of a pass see all keys of the earlier
    passes, so that level needs no causal mask, which the fastest kernels do not support. Blocks
    need no causal mask either: their rows see all keys above them, and each other.
    """
    levels = []
    width = (spans[0].start - spans[0].base) // page_size if len(spans) == 1 else 0
    if width * page_size >= _MIN_LEVEL_KEYS:
        bounds, done = np.array([0, len(spans[0].tokens)]), np.array([width * page_size])
        levels.append(
            make_level(bounds[:1], bounds[1:], pages[:, :width], done, base, causal=False)
        )
        pages, base = pages[:, width:], base + done
    for is_block in (False, True):
        span, start, stop, end, _ = (column[runs.is_block == is_block] for column in runs)
        if len(span):
            keys = end - base[span]
            levels.append(
                make_level(start, stop, pages[span], keys, base[span], causal=not is_block)
            )
    return levels


def compute_slot_mapping(pages: Pages, offsets: Ints, page_size: int) -> Ints:
    """Return the cache slot of one offset in each page table, [N].

    Args:
        pages: Page tables, [N, pages].
        offsets: Offset of a token in each table, in tokens, [N].
        page_size: Tokens per page.
    """
    page = pages[np.arange(len(offsets)), offsets // page_size].astype(np.int64)
    return page * page_size + offsets % page_size


def build_step_inputs(
    run: EngineRun, slots: Ints, counts: Ints, source: Ints, forced: Ints
) -> tuple[Ints, HostLevel]:
    """Build the inputs of a step in which each row draws one token.

    Args:
        run: Shared state of the run.
        slots: Slots of the rows, [rows].
        counts: Number of generated tokens of each row, [rows].
        source: As `SOURCE` in `DecodeStep`, [rows].
        forced: As `FORCED` in `DecodeStep`, [rows].

    Returns:
        The inputs, as in `DecodeStep`, [8, rows], and the level of the rows' own tokens.
    """
    rows = run.rows
    ends, base = rows.stop[slots] + counts, rows.base[slots]
    pages = rows.table[slots, : int(rows.num_pages[slots].max())]
    bounds = np.arange(len(slots) + 1)
    own_level = make_level(bounds[:-1], bounds[1:], pages, ends - base, base, causal=False)
    cache_slots = compute_slot_mapping(pages, ends - 1 - base, run.cache.page_size)
    rotary = ends - 1 + rows.shift[slots]
    columns = [rows.last[slots], source, ends - 1, cache_slots, rows.seed[slots], counts]
    return np.stack([*columns, forced, rotary]), own_level


def build_step_rows(run: EngineRun, slots: Ints, levels: Sequence[HostLevel]) -> StepRows:
    """Build the inputs that stay the same while the same rows are decoded.

    Args:
        run: Shared state of the run.
        slots: Slots of the rows.
        levels: Shared levels above the rows.
    """
    sets, index = run.param_sets_of(run.rows.params[slots])
    generated_spans = None
    if any(param_set.params.has_penalties for param_set in sets):
        requests, inverse = np.unique(run.rows.request[slots], return_inverse=True)
        generated_spans = find_generated_spans(
            [run.requests[number] for number in requests.tolist()]
        )[inverse]
    masked = any(param_set.stopping.grammar is not None for param_set in sets)
    return StepRows(
        levels, [s.params for s in sets], [s.bias for s in sets], index, generated_spans, masked
    )


def find_generated_spans(requests: Sequence[LiveRequest]) -> Ints:
    """Return where texts of requests were drawn: first positions and ends, [requests, runs, 2].

    All tokens after a prompt are drawn, and in a search some tokens of the prompt too.
    """
    runs: list[list[tuple[int, int]]] = []
    for request in requests:
        spans_of_request: list[tuple[int, int]] = [(request.segment.stop, NEVER)]
        for segment in request.segment.path():
            if segment.params is None:  # it is given text
                continue
            first, stop = spans_of_request[-1]
            if segment.stop == first:
                spans_of_request[-1] = segment.start, stop
            else:
                spans_of_request.append((segment.start, segment.stop))
        runs.append(spans_of_request)
    spans = np.zeros((len(runs), max(map(len, runs), default=1), 2), dtype=np.int64)
    for row, spans_of_request in enumerate(runs):
        spans[row, : len(spans_of_request)] = spans_of_request
    return spans


def build_prompt_histories(run: EngineRun, requests: Sequence[LiveRequest]) -> TokenHistory:
    """Return the prompts of requests; their keys are computed once the earlier passes finish."""
    segments = [request.segment for request in requests]
    bounds = np.arange(len(segments) + 1)
    chains = pad_tables([segment.above for segment in segments], fill=-1)
    tables = [s.table for s in segments if s.table is not None]
    assert len(tables) == len(segments), "a prompt has no pages"
    stop, base = (np.array([getattr(s, at) for s in segments]) for at in ("stop", "base"))
    own_level = make_level(
        bounds[:-1], bounds[1:], pad_tables(tables), stop - base, base, causal=True
    )
    levels = [*build_shared_levels(chains, bounds, run.store.keys_of), own_level]
    return run.model_runner.build_histories(levels, stop, find_generated_spans(requests))
