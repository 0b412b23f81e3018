"""The key-value cache: a pool of pages whose references are counted.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in every layer.
A page table is an int32 array of page ids. In a table that starts at position `base`, position p
lies in entry (p - base) // page_size. Full pages are shared: whoever uses one takes a reference.
A last page that is partly filled is copied when a sequence goes on in it. A page is free when
nobody has a reference on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device
from treegen.ops.cache.state_cache import StateCache

Pages = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, for all pages.

    keys: [num_pages, page_size, kv_heads, k_dim].
    values: [num_pages, page_size, kv_heads, v_dim]. Of latents they are the first numbers of keys.
    """

    keys: Tensor
    values: Tensor


class PagePool:
    """Allocates pages by id, and counts references on them.

    Page 0 is never given out: page tables are padded with it.

    num_pages: usable pages.
    num_free: pages without a reference.
    num_freed: how often a page has lost its last reference.
    peak_used: most pages that were in use at a time.
    num_taken_back: how many loans were taken back.

    Pages that are lent (`lend`) stay free: whoever has borrowed them loses them when they are
    needed.
    """

    def __init__(self, num_pages: int) -> None:
        """All pages are free; their ids are 1 to `num_pages`."""
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)
        self._refs[0] = 1
        self.num_free = num_pages
        self.num_freed = 0
        self.peak_used = 0
        self.num_taken_back = 0
        self._is_lent = np.zeros(num_pages + 1, dtype=np.bool_)
        self._num_lent = 0
        self._loans: dict[int, Pages] = {}  # oldest first

    @property
    def num_used(self) -> int:
        """Pages with a reference."""
        return self.num_pages - self.num_free

    def allocate(self, count: int, *, contiguous: bool = False) -> Pages:
        """Take `count` free pages, each with one reference; the caller has checked `num_free`.

        Args:
            contiguous: Prefer consecutive ids, which dense kernels can read in place.
        """
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        if count == 0:
            return np.empty(0, dtype=np.int32)
        while count > self.num_unlent:
            self.end_loan(next(reversed(self._loans)))
        # Segments need runs of pages, which are taken from the low end. Rows grow by single pages,
        # which are taken from the high end, so that they do not break up runs.
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
            free = np.flatnonzero((self._refs[start:] == 0) & ~self._is_lent[start:])
            if len(free) >= count or start == 0:
                return free[-count:] + start
            width *= 4

    def _first_run(self, count: int) -> NDArray[np.int64]:
        """The first run of `count` free pages; where there is none, the first free pages."""
        width = 4 * count + 1024
        while True:
            free = np.flatnonzero((self._refs[:width] == 0) & ~self._is_lent[:width])
            runs = np.flatnonzero(free[count - 1 :] - free[: max(len(free) - count + 1, 0)] < count)
            if len(runs) or width >= len(self._refs):
                at = runs[0] if len(runs) else 0
                return free[at : at + count]
            width *= 4

    @property
    def num_unlent(self) -> int:
        """Free pages that are not lent."""
        return self.num_free - self._num_lent

    def lend(self, name: int, count: int, size: int) -> Pages | None:
        """Lend blocks of `size` consecutive free pages, which begin at multiples of `size`.

        Returns the numbers of `count` blocks, of which block b has the pages b * size and those
        that follow; None if there are not so many.

        Args:
            name: To take the loan back by.
        """
        whole = len(self._refs) // size
        free = (self._refs == 0) & ~self._is_lent
        blocks = np.flatnonzero(free[: whole * size].reshape(whole, size).all(axis=1))[:count]
        if len(blocks) < count:
            return None
        self._is_lent[: whole * size].reshape(whole, size)[blocks] = True
        self._loans[name] = (blocks[:, None] * size + np.arange(size)).ravel().astype(np.int32)
        self._num_lent += count * size
        return blocks.astype(np.int32)

    def end_loan(self, name: int) -> None:
        """End a loan, if there is one of the name."""
        pages = self._loans.pop(name, None)
        if pages is not None:
            self._is_lent[pages] = False
            self._num_lent -= len(pages)
            self.num_taken_back += 1

    def is_lent(self, name: int) -> bool:
        """Whether there is a loan of a name."""
        return name in self._loans

    def end_all_loans(self) -> None:
        """End all loans."""
        for name in list(self._loans):
            self.end_loan(name)

    def share(self, pages: Pages) -> Pages:
        """Take one more reference on each of some different pages; returns the pages."""
        assert (self._refs[pages] > 0).all(), "shared a free page"
        self._refs[pages] += 1
        return pages

    def free(self, pages: Pages) -> None:
        """Give up one reference on a page for each time that it occurs in `pages`."""
        np.subtract.at(self._refs, pages, 1)
        left = self._refs[pages]
        assert (left >= 0).all(), "freed a free page"
        freed = len(set(pages[left == 0].tolist()))
        self.num_free += freed
        self.num_freed += freed

    def num_references(self, pages: Pages) -> NDArray[np.int32]:
        """References on each page."""
        return self._refs[pages]

    def reset(self, tables: Iterable[Pages]) -> None:
        """Forget all references but those of some page tables, and all loans."""
        self.end_all_loans()
        self._refs[:] = 0
        self._refs[0] = 1
        for table in tables:
            np.add.at(self._refs, table, 1)
        self.num_free = int((self._refs == 0).sum())

    def check(self, tables: Iterable[Pages]) -> None:
        """Assert that all references are those of `tables`, so that no page is lost."""
        listed = np.concatenate([np.zeros(1, dtype=np.int64), *tables])
        counts = np.bincount(listed, minlength=len(self._refs))
        wrong = np.flatnonzero(counts != self._refs)
        assert not len(wrong), f"pages {wrong[:8].tolist()} have wrong reference counts"
        assert self.num_free == int((self._refs == 0).sum()), "free pages are miscounted"
        lent = np.concatenate([np.zeros(0, dtype=np.int32), *self._loans.values()])
        assert np.array_equal(np.sort(lent), np.flatnonzero(self._is_lent)), "loans are lost"
        assert len(lent) == self._num_lent, "pages that are lent are miscounted"
        assert not self._refs[lent].any(), "a page that is lent is in use"


class PagedCache:
    """A pool of pages with the tensors that they lie in.

    layers: one LayerKV for each attention layer; some layers may share one.
    tokens_S: int32, the token in each slot, whose key and value lie there.
    pool: which pages are free.
    states: those of recurrent layers, beside the pages; None for a model without any.
    on_copy: called before tokens are copied, with what `copy_tokens` is given.
    """

    on_copy: Callable[[NDArray[np.int64], NDArray[np.int64]], None] | None = None

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_pages: int,
        page_size: int,
        states: StateCache | None = None,
    ) -> None:
        """The tensors of `layers` have room for num_pages + 1 pages, with the padding page."""
        self.layers = layers
        self.states = states
        # Layers may share tensors, and values may be a part of keys: what is shared is copied once.
        pools = [tensor for layer in layers for tensor in (layer.values, layer.keys)]
        self._pools = list({tensor.data_ptr(): tensor for tensor in pools}.values())
        self.page_size = page_size
        owned = [*self._pools, *(t for layer in states.layers for t in layer)] if states else pools
        device = owned[0].device if owned else torch.device("cpu")
        tokens = torch.zeros(num_pages + 1, page_size, dtype=torch.int32, device=device)
        self._pools.append(tokens)
        self.tokens_S: Tensor = tokens.view(-1)
        self.pool = PagePool(num_pages)

    def note_tokens(self, slots_T: Tensor, tokens_T: Tensor) -> None:
        """Note which tokens the slots have, whose keys and values a pass writes."""
        self.tokens_S.scatter_(0, slots_T, tokens_T.int())

    def copy_tokens(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy tokens, with their keys and values in all layers, from slots to slots.

        A slot is page * page_size + offset.
        """
        if len(source) == 0:
            return
        if self.on_copy is not None:
            self.on_copy(source, target)
        device = self.tokens_S.device
        from_slots, to_slots = to_device(source, device), to_device(target, device)
        for pool in self._pools:
            # Not all versions of torch copy numbers of 8 bits by index.
            slots = pool.view(torch.uint8) if pool.itemsize == 1 else pool
            slots = slots.view(-1, *pool.shape[2:])
            slots[to_slots] = slots[from_slots]


def table_slots(table: Pages, start: int, stop: int, page_size: int) -> NDArray[np.int64]:
    """The slots of the tokens `start` to `stop` of a page table, counted from its first token."""
    offsets = np.arange(start, stop)
    return table[offsets // page_size].astype(np.int64) * page_size + offsets % page_size
