"""The key-value cache: a pool of pages, shared by reference and freed when nobody refers.

A page holds `page_size` consecutive tokens of one sequence in every layer. A page table is an
int32 array of page ids; position p of a table that starts at `base` lies in page
(p - base) // page_size. Full pages are shared by taking a reference; a partly filled last page is
copied when somebody continues it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.device import to_device

Pages = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, for all pages.

    keys: [num_pages, page_size, kv_heads, k_dim]; values: [num_pages, page_size, kv_heads, v_dim].
    """

    keys: Tensor
    values: Tensor


class PagePool:
    """Allocates page ids and counts references. Page 0 is never given out: it is padding."""

    def __init__(self, num_pages: int) -> None:
        """A pool of `num_pages` usable pages, ids 1 to num_pages."""
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)
        self._refs[0] = 1
        self.num_free = num_pages
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        """Pages that somebody refers to."""
        return self.num_pages - self.num_free

    def allocate(self, count: int, *, contiguous: bool = False) -> Pages:
        """Take `count` free pages, each with one reference.

        contiguous: prefer a run of consecutive ids, so that dense kernels can read it in place.
        The caller has checked `num_free`.
        """
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        if count == 0:
            return np.empty(0, dtype=np.int32)
        # Runs are taken from the low end and single pages from the high end, so that the pages
        # that rows grow by do not break up the room that segments need.
        pages = self._first_run(count) if contiguous else self._last_free(count)
        self._refs[pages] = 1
        self.num_free -= count
        self.peak_used = max(self.peak_used, self.num_used)
        return pages.astype(np.int32)

    def _last_free(self, count: int) -> NDArray[np.int64]:
        size = len(self._refs)
        width = 4 * count + 1024
        while True:
            start = max(size - width, 0)
            free = np.flatnonzero(self._refs[start:] == 0)
            if len(free) >= count or start == 0:
                return free[-count:] + start
            width *= 4

    def _first_run(self, count: int) -> NDArray[np.int64]:
        """The first free pages in a row, or the first ones if there are not as many in a row."""
        width = 4 * count + 1024
        while True:
            free = np.flatnonzero(self._refs[:width] == 0)
            runs = np.flatnonzero(free[count - 1 :] - free[: max(len(free) - count + 1, 0)] < count)
            if len(runs) or width >= len(self._refs):
                at = runs[0] if len(runs) else 0
                return free[at : at + count]
            width *= 4

    def share(self, pages: Pages) -> Pages:
        """Take one more reference on each page (ids all different); returns them."""
        assert (self._refs[pages] > 0).all(), "shared a free page"
        self._refs[pages] += 1
        return pages

    def free(self, pages: Pages) -> None:
        """Give up one reference on each page; an id may occur several times."""
        np.subtract.at(self._refs, pages, 1)
        assert (self._refs[pages] >= 0).all(), "freed a free page"
        self.num_free += int((self._refs[np.unique(pages)] == 0).sum())

    def num_references(self, pages: Pages) -> NDArray[np.int32]:
        """References on each page."""
        return self._refs[pages]

    def reset(self, tables: Iterable[Pages]) -> None:
        """Forget all references but those of `tables`."""
        self._refs[:] = 0
        self._refs[0] = 1
        for table in tables:
            np.add.at(self._refs, table, 1)
        self.num_free = int((self._refs == 0).sum())

    def check(self, tables: Iterable[Pages]) -> None:
        """Assert that the references are exactly those of `tables` and that nothing is lost."""
        counts = np.zeros_like(self._refs)
        counts[0] = 1
        for table in tables:
            np.add.at(counts, table, 1)
        wrong = np.flatnonzero(counts != self._refs)
        assert not len(wrong), f"pages {wrong[:8].tolist()} have wrong reference counts"
        assert self.num_free == int((self._refs == 0).sum()), "free pages are miscounted"


class PagedCache:
    """The pool and the tensors it hands out, one LayerKV per attention layer."""

    def __init__(self, layers: Sequence[LayerKV], num_pages: int, page_size: int) -> None:
        """`layers` hold num_pages + 1 pages: page 0 is padding."""
        self.layers = layers
        # Layers may share a pool; copying it twice would be wasted.
        pools = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        self._pools = list({id(tensor): tensor for tensor in pools}.values())
        self.page_size = page_size
        self.pool = PagePool(num_pages)

    def copy_tokens(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy keys and values from slots to slots (page * page_size + offset), in all layers."""
        if len(source) == 0:
            return
        device = self._pools[0].device if self._pools else torch.device("cpu")
        from_slots, to_slots = to_device(source, device), to_device(target, device)
        for pool in self._pools:
            slots = pool.view(-1, *pool.shape[2:])
            slots[to_slots] = slots[from_slots]


def table_slots(table: Pages, start: int, stop: int, page_size: int) -> NDArray[np.int64]:
    """Slots of offsets start to stop in a page table."""
    offsets = np.arange(start, stop)
    return table[offsets // page_size].astype(np.int64) * page_size + offsets % page_size
