"""Keys and values of all heads beside the latents of wide segments, where reading them costs less.

A model with latent attention keeps latents. A segment with many rows below it is read faster by
the keys and values that are made of them (`CostModel.expands`). These lie in pages that the pool
lends: they stay free, and the pool takes them back when something else needs them. So copies are
the first to go. They are made again by one product once there is room, and are not read while few
rows are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treegen.common.spec import ModelSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.segments.store import SegmentStore
from treegen.ops.cache.pool import PagedCache, Pages, table_slots
from treegen.prompts.plan.cost import CostModel


@dataclass(frozen=True, slots=True)
class ExpandedKVOptions:
    """Which segments have copies: those of a model for which that pays on a device."""

    spec: ModelSpec
    cost: CostModel


@dataclass(frozen=True, slots=True)
class _ExpandedKV:
    """blocks: as the pool has lent them. table, num_keys: of the segment, as it was copied."""

    blocks: Pages
    table: Pages
    num_keys: int


class ExpandedKVCache:
    """The copies of one run's segments, by index."""

    def __init__(
        self,
        cache: PagedCache,
        store: SegmentStore,
        executor: ModelRunner,
        options: ExpandedKVOptions,
    ) -> None:
        """There is none yet."""
        latent = options.spec.latent
        assert latent is not None
        self._latent, self._pages = latent, options.spec.copy_pages
        self._itemsize, self._cost = options.spec.itemsize, options.cost
        self._cache, self._store, self._executor = cache, store, executor
        self._made: dict[int, _ExpandedKV] = {}
        self._times_lost: dict[int, int] = {}

    def get_or_expand(self, index: int, rows: int) -> Pages | None:
        """The blocks of a segment's copy, to be read by so many rows; None to read its latents.

        The copy is made if there is none and there is room.
        """
        if not self._cost.should_expand(self._latent, rows, self._itemsize):
            return None
        table, num_keys, _ = self._store.keys_of(index)
        copy = self._made.get(index)
        if copy is not None:
            is_lent = self._cache.pool.is_lent(index)
            if is_lent and copy.num_keys == num_keys and np.array_equal(copy.table, table):
                return copy.blocks
            del self._made[index]
            self._cache.pool.end_loan(index)
            self._times_lost[index] = self._times_lost.get(index, 0) + 1
        return self._make(index, table, num_keys)

    def _make(self, index: int, table: Pages, num_keys: int) -> Pages | None:
        """Make a copy, which takes half of what is free at most, and less if it was lost before."""
        pool, page_size = self._cache.pool, self._cache.page_size
        count = -(-num_keys // page_size)
        if count * self._pages << self._times_lost.get(index, 0) + 1 > pool.num_unlent:
            return None
        blocks = pool.lend(index, count, self._pages) if count else None
        if blocks is None:
            return None
        self._executor.write_copies(
            table_slots(table, 0, num_keys, page_size), table_slots(blocks, 0, num_keys, page_size)
        )
        self._made[index] = _ExpandedKV(blocks, table.copy(), num_keys)
        return blocks
