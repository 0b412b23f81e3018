"""Expanded keys and values of wide segments, where reading them is faster than reading latents.

A model with latent attention stores latents. With many rows below a segment, reading keys and
values expanded from the latents is faster (`CostModel.should_expand`). These copies use pages that
the pool lends: the pages count as free, and the pool takes them back when something else needs
them, before anything is evicted. Copies are made again by one product once there is room, and are
not read while few rows are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treegen.common.spec import ModelSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.segments.store import SegmentStore
from treegen.ops.cache.pool import PagedCache, Pages, table_slots
from treegen.prompts.plan.cost_model import CostModel, should_expand


@dataclass(frozen=True, slots=True)
class _ExpandedKV:
    """The copy of one segment."""

    blocks: Pages
    """Numbers of the blocks of consecutive pages that the pool has lent."""
    table: Pages
    """Page table of the segment when it was copied."""
    num_keys: int
    """Number of keys of the segment when it was copied."""


class ExpandedKVCache:
    """Expanded keys and values of one run's segments, by index of the segment."""

    def __init__(
        self,
        cache: PagedCache,
        store: SegmentStore,
        model_runner: ModelRunner,
        spec: ModelSpec,
        cost: CostModel,
    ) -> None:
        """Set up a cache without copies.

        Args:
            cache: The paged KV cache.
            store: The segments of the run.
            model_runner: Expands latents.
            spec: The model.
            cost: The costs of its device, which decide which segments get copies.
        """
        self._spec, self._cost = spec, cost
        self._cache, self._store, self._model_runner = cache, store, model_runner
        self._copies: dict[int, _ExpandedKV] = {}
        self._times_lost: dict[int, int] = {}

    def get_or_expand(self, index: int, rows: int) -> Pages | None:
        """Return the page blocks of a segment's copy for `rows` rows; None to read its latents.

        A missing copy is made if there is room.
        """
        table, num_keys, start = self._store.keys_of(index)
        if not should_expand(self._spec, self._cost, rows, start + num_keys):
            return None
        copy = self._copies.get(index)
        if copy is not None:
            is_lent = self._cache.pool.is_lent(index)
            if is_lent and copy.num_keys == num_keys and np.array_equal(copy.table, table):
                return copy.blocks
            del self._copies[index]
            self._cache.pool.end_loan(index)
            self._times_lost[index] = self._times_lost.get(index, 0) + 1
        return self._make(index, table, num_keys)

    def _make(self, index: int, table: Pages, num_keys: int) -> Pages | None:
        """Make a copy if it takes at most half of the free pages, or less if it was lost before."""
        pool, page_size = self._cache.pool, self._cache.page_size
        count, copy_pages = -(-num_keys // page_size), self._spec.copy_pages
        if count * copy_pages << self._times_lost.get(index, 0) + 1 > pool.num_unlent:
            return None
        blocks = pool.lend(index, count, copy_pages) if count else None
        if blocks is None:
            return None
        self._model_runner.write_copies(
            table_slots(table, 0, num_keys, page_size), table_slots(blocks, 0, num_keys, page_size)
        )
        self._copies[index] = _ExpandedKV(blocks, table.copy(), num_keys)
        self._forget_freed_segments()
        return blocks

    def _forget_freed_segments(self) -> None:
        """Drop entries of segments that do not exist any more, once these are the majority."""
        segments = self._store.segments
        for entries in (self._copies, self._times_lost):
            if len(entries) > 2 * len(segments):
                for index in entries.keys() - segments.keys():
                    del entries[index]
