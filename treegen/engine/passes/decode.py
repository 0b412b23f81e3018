"""Decode steps: chooses the rows of the next step, and launches it while the last still runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treegen.engine.compute.cuda_graphs import pad_num_query_rows
from treegen.engine.compute.decode_step import (
    COUNT,
    FORCED,
    NUM_INPUTS,
    POSITION,
    ROTARY,
    SEED,
    SLOT,
    SOURCE,
    TOKEN,
    DeferredDraws,
)
from treegen.engine.compute.levels import Ints, build_shared_levels, expand_level, make_level
from treegen.engine.compute.model_runner import StepInputs, StepRows
from treegen.engine.features import Features
from treegen.engine.passes.pass_inputs import build_step_inputs, build_step_rows
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.rows.table import VerifyInput
from treegen.ops.attention import PreparedLevels
from treegen.ops.sampling.draw import AsyncDraws, Draws


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """The draws of a step that may still be running: one or several per row."""

    slots: Ints
    """The slot of each draw's row."""
    serials: Ints
    """Serial numbers of these rows, which show whether a slot still has the same row."""
    fetch: AsyncDraws
    """The draws, being copied to the host."""
    verify_input: VerifyInput | None = None
    """The draft tokens that the step verifies; None if each row draws once."""
    keys: int = 0
    """Number of keys read in each layer."""
    version: int = 0
    """The version of the weights."""


@dataclass(frozen=True, slots=True)
class DeferredStep:
    """A decode step that draws only once the previous tokens are known, which grammars need."""

    slots: Ints
    """As in `InFlightStep`."""
    serials: Ints
    """As in `InFlightStep`."""
    undrawn: DeferredDraws
    """The logits to draw from."""
    number: int
    """Number of earlier steps of the run."""
    verify_input: VerifyInput | None
    """As in `InFlightStep`."""
    keys: int
    """As in `InFlightStep`."""


class DecodeSteps:
    """Launches the decode steps of one run."""

    def __init__(self, run: EngineRun, queue: RowQueue, features: Features) -> None:
        """Set up the decode steps of one run.

        Args:
            run: Shared state of the run.
            queue: Its rows.
            features: Its optional features.
        """
        self._run, self._queue, self._features = run, queue, features
        self._graphs = run.model_runner.graphs
        self._cached_rows: tuple[Ints, int, StepRows, int] | None = None
        self._own_level_memo: dict[Any, Any] = {}  # expanded levels of the same rows' own tokens

    def next_rows(self, flight: InFlightStep | None) -> tuple[Ints, Ints, Ints]:
        """Return the rows of the next step, their token counts, and their indices in the last step.

        Rows that have reached their limit, or reach it in the last step, are left out: the number
        of tokens is known even if the tokens are not. Rows whose thinking budget the last step uses
        up are left out too, because only their tokens show whether the thinking has ended. A row
        that was not in the last step has the index -1.

        Args:
            flight: The last step, if its tokens are not known yet; None otherwise.
        """
        order, rows, budgets = self._queue.live_slots, self._run.rows, self._features.budgets
        counts, source = rows.count[order], np.full(len(order), -1)
        if flight is not None:
            column_of = np.full(len(rows.serial), -1)
            column_of[flight.slots] = np.arange(len(flight.slots))
            source = column_of[order]
            source[flight.serials[source] != rows.serial[order]] = -1
            counts = counts + (source >= 0)
        continues = counts < rows.limit[order]
        if budgets.used:
            continues &= budgets.decide(order, counts, source < 0)
        if continues.all():
            return order, counts, source
        return order[continues], counts[continues], source[continues]

    def launch(
        self, order: Ints, counts: Ints, source: Ints, before: InFlightStep | None
    ) -> InFlightStep | DeferredStep:
        """Launch a decode step of the rows that `next_rows` returned.

        Args:
            order: Slots of the rows, depth first, [rows].
            counts: Number of generated tokens of each row, [rows].
            source: Index of each row in the last step, or -1, [rows].
            before: The last step, if its tokens are not known yet; None otherwise.
        """
        run = self._run
        step_rows, shared_keys = self._get_step_rows(order)
        forced = self._features.budgets.get_forced_tokens(order, counts)
        inputs, own_level = build_step_inputs(run, order, counts, source, forced)
        draws, levels = run.model_runner.decode(
            StepInputs(
                inputs=inputs,
                own_level=own_level,
                rows=step_rows,
                uses_previous_draws=before is not None,
                states=self._queue.states.step(order),
                graphs=self._graphs is not None and self._graphs.eager_because is None,
                number=run.usage.decode_steps,
            )
        )
        keys = shared_keys + int(own_level.kv_len_G.sum())
        self._record_usage(levels, len(order), keys, int(inputs[POSITION].sum()) + len(order))
        return self._in_flight(order, draws, None, keys)

    def draw(self, pending: DeferredStep) -> InFlightStep:
        """Draw from the logits of a deferred step, once the previous tokens are known."""
        slots, undrawn, verify_input = pending.slots, pending.undrawn, pending.verify_input
        masks = self._features.grammars.masks(
            slots, pending.serials, verify_input, undrawn.num_rows
        )
        draws = self._run.model_runner.finish(undrawn, masks, pending.number).first(len(slots))
        fetch, version = AsyncDraws(draws), self._run.gate.version
        return InFlightStep(slots, pending.serials, fetch, verify_input, pending.keys, version)

    def verify(
        self, order: Ints, counts: Ints, verify_input: VerifyInput
    ) -> InFlightStep | DeferredStep:
        """Launch a step in which rows also draw after their draft tokens.

        A row has several consecutive query rows in such a step: its last token and its draft
        tokens. All of them attend to the same levels; of the row's own keys, a query row sees those
        up to its own position.

        Args:
            order: Slots of the rows, from `next_rows`; all their tokens must be known, [rows].
            counts: Number of generated tokens of each row, from `next_rows`, [rows].
            verify_input: The draft tokens of the rows.
        """
        run, usage = self._run, self._run.usage
        rows, page_size = run.rows, run.cache.page_size
        row_T, offsets, num = verify_input.row_T, verify_input.offsets, len(verify_input.row_T)
        slots_T, base, first = order[row_T], rows.base[order], rows.stop[order] + counts - 1
        keys_R = first + verify_input.num_R + 1 - base
        pages = rows.table[order, : int(rows.num_pages[order].max())]
        step_rows, shared_keys = self._get_step_rows(order)
        levels = [expand_level(level, offsets) for level in step_rows.levels]
        bounds = np.arange(len(order) + 1)
        own_level = make_level(bounds[:-1], bounds[1:], pages, keys_R, base, causal=True)
        columns_T = np.stack([first, first - base, counts, rows.seed[order]])[:, row_T]
        columns_T[:3] += verify_input.index_T
        positions_T, at_T, counts_T, seeds_T = columns_T
        graphs = self._graphs is not None and self._graphs.eager_because is None
        inputs = np.zeros((NUM_INPUTS, pad_num_query_rows(num) if graphs else num), dtype=np.int64)
        inputs[TOKEN, :num] = verify_input.inputs(rows.last[order])
        inputs[SOURCE] = -1
        inputs[POSITION, :num] = positions_T
        page_T = pages[row_T, at_T // page_size].astype(np.int64)
        inputs[SLOT, :num] = page_T * page_size + at_T % page_size
        inputs[SEED, :num], inputs[COUNT, :num] = seeds_T, counts_T
        inputs[FORCED, :num] = self._features.budgets.get_forced_tokens(slots_T, counts_T)
        inputs[ROTARY, :num] = positions_T + rows.shift[slots_T]
        index = np.zeros(inputs.shape[1], dtype=np.int64)
        index[:num] = step_rows.index[row_T]
        generated_spans = None
        if step_rows.generated_spans is not None:
            generated_spans = np.zeros(
                (len(index), *step_rows.generated_spans.shape[1:]), dtype=np.int64
            )
            generated_spans[:num] = step_rows.generated_spans[row_T]
        draws, prepared = run.model_runner.decode(
            StepInputs(
                inputs=inputs,
                own_level=expand_level(own_level, offsets, self._own_level_memo),
                rows=replace(
                    step_rows, levels=levels, index=index, generated_spans=generated_spans
                ),
                uses_previous_draws=False,
                states=None,
                graphs=graphs,
                number=usage.decode_steps,
            )
        )
        keys = shared_keys + int(keys_R.sum())
        self._record_usage(prepared, len(order), keys, int(positions_T.sum()) + num)
        usage.drafted_tokens += num - len(order)
        return self._in_flight(slots_T, draws, verify_input, keys)

    def _in_flight(
        self, slots: Ints, draws: Draws | DeferredDraws, verify_input: VerifyInput | None, keys: int
    ) -> InFlightStep | DeferredStep:
        """Return a launched step; its arguments are fields of `InFlightStep`."""
        run, serials = self._run, self._run.rows.serial[slots]
        if isinstance(draws, DeferredDraws):
            number = run.usage.decode_steps - 1
            return DeferredStep(slots, serials, draws, number, verify_input, keys)
        if verify_input is not None:
            draws = draws.first(len(slots))  # without padding
        return InFlightStep(slots, serials, AsyncDraws(draws), verify_input, keys, run.gate.version)

    def drop_cached_rows(self) -> None:
        """Drop the cached inputs of the last step, after keys were computed again."""
        self._cached_rows = None

    def look_ahead(self) -> None:
        """Prepare the inputs of the rows that are live now, unless the last step had the same."""
        if len(self._queue.live_slots):
            self._get_step_rows(self._queue.live_slots)

    def _record_usage(
        self, levels: PreparedLevels, num_rows: int, read: int, unshared: int
    ) -> None:
        """Count a step: its rows, the keys it reads, and the keys it would read without sharing."""
        usage = self._run.usage
        usage.impl = levels.impl
        usage.count_kernels(levels.kernels)
        usage.key_tokens_read += read
        usage.key_tokens_unshared += unshared
        usage.peak_rows = max(usage.peak_rows, num_rows)
        usage.decode_steps += 1

    def _get_step_rows(self, order: Ints) -> tuple[StepRows, int]:
        """Return the inputs that stay the same for these rows, and the keys of their levels."""
        run = self._run
        # `RowQueue.live_slots` says why arrays may be compared by identity.
        if self._cached_rows is not None and self._cached_rows[0] is order:
            _, num_ended_loans, step_rows, read = self._cached_rows
            if num_ended_loans == run.pool.num_ended_loans:  # all expanded copies still exist
                return step_rows, read
        chains = run.rows.chain[order]
        expanded = self._features.expanded
        copy_of = expanded.get_or_expand if expanded is not None else None
        levels = build_shared_levels(chains, np.arange(len(order) + 1), run.store.keys_of, copy_of)
        keys = sum(int(level.kv_len_G.sum()) for level in levels)
        rows = build_step_rows(run, order, levels)
        self._cached_rows, self._own_level_memo = (order, run.pool.num_ended_loans, rows, keys), {}
        return rows, keys
