"""The KV cache: a pool of reference-counted pages.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in every layer.
A page table is an int32 array of page ids. In a table that starts at position `base`, position p
is in entry (p - base) // page_size. Full pages are shared: each user takes a reference, and a page
is free when it has none. A partly filled last page is copied before a sequence continues in it.

Compiled code takes small proxies for pools and states, because a graph is compiled for the shapes
of its tensors: each other amount of memory would need another compilation, in the next process too.

Legend: T tokens, G key heads, K key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device
from treegen.ops.attention.types import E4M3_MAX, FP8
from treegen.ops.cache.state_cache import StateCache
from treegen.ops.kernel_modules import import_kernels

Pages = NDArray[np.int32]
_FEW_PAGES: Final = 8


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, for all pages."""

    keys: Tensor
    """[num_pages, page_size, kv_heads, k_dim]."""
    values: Tensor
    """[num_pages, page_size, kv_heads, v_dim]. For latents, the first numbers of the keys."""
    index: Tensor | None = None
    """[num_pages, page_size, index_dim], the keys of the layer's indexer; None without one."""


class PagePool:
    """Allocates pages by id, and counts references to them.

    Page 0 is never allocated, because page tables are padded with it.

    Lent pages (`lend`) still count as free: the pool takes them back when it needs them.

    Attributes:
        num_pages: Usable pages.
        num_free: Pages without a reference.
        num_freed: How often a page has lost its last reference.
        peak_used: The largest number of pages in use at one time.
        num_ended_loans: Number of loans that ended.
    """

    def __init__(self, num_pages: int) -> None:
        """Create a pool of free pages with the ids 1 to `num_pages`."""
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)
        self._refs[0] = 1
        self.num_free = num_pages
        self.num_freed = 0
        self.peak_used = 0
        self.num_ended_loans = 0
        self._is_lent = np.zeros(num_pages + 1, dtype=np.bool_)
        self._num_lent = 0
        self._loans: dict[int, Pages] = {}  # oldest first

    @property
    def num_used(self) -> int:
        """The number of pages with a reference."""
        return self.num_pages - self.num_free

    def allocate(self, count: int, *, contiguous: bool = False) -> Pages:
        """Allocate `count` free pages, each with one reference; the caller has checked `num_free`.

        Args:
            count: Number of pages.
            contiguous: Prefer consecutive ids, which dense kernels can read in place.
        """
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        if count == 0:
            return np.empty(0, dtype=np.int32)
        while count > self.num_unlent:
            self.end_loan(next(reversed(self._loans)))
        # Segments need runs of pages, which come from the low end. Rows grow by single pages, which
        # come from the high end, so that they do not break up runs.
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
        """Return the first run of `count` free pages; without such a run, the first free pages."""
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
        """The number of free pages that are not lent."""
        return self.num_free - self._num_lent

    def lend(self, name: int, count: int, size: int) -> Pages | None:
        """Lend blocks of `size` consecutive free pages, which begin at multiples of `size`.

        Args:
            name: Identifies the loan.
            count: Number of blocks.
            size: Pages per block.

        Returns:
            The numbers of `count` blocks, where block b has the pages from b * size to
            b * size + size - 1. None if the pool has fewer free blocks.
        """
        num_blocks = len(self._refs) // size
        free = (self._refs == 0) & ~self._is_lent
        blocks = np.flatnonzero(free[: num_blocks * size].reshape(num_blocks, size).all(axis=1))[
            :count
        ]
        if len(blocks) < count:
            return None
        self._is_lent[: num_blocks * size].reshape(num_blocks, size)[blocks] = True
        self._loans[name] = (blocks[:, None] * size + np.arange(size)).ravel().astype(np.int32)
        self._num_lent += count * size
        return blocks.astype(np.int32)

    def end_loan(self, name: int) -> None:
        """End the loan with this name, if it exists."""
        pages = self._loans.pop(name, None)
        if pages is not None:
            self._is_lent[pages] = False
            self._num_lent -= len(pages)
            self.num_ended_loans += 1

    def is_lent(self, name: int) -> bool:
        """Return whether a loan with this name exists."""
        return name in self._loans

    def end_all_loans(self) -> None:
        """End all loans."""
        for name in list(self._loans):
            self.end_loan(name)

    def share(self, pages: Pages, count: int = 1) -> Pages:
        """Add `count` references to each of some distinct pages; returns the pages."""
        assert (self._refs[pages] > 0).all(), "shared a free page"
        self._refs[pages] += count
        return pages

    def free(self, pages: Pages) -> None:
        """Drop one reference to a page for each of its occurrences in `pages`."""
        if len(pages) <= _FEW_PAGES:  # NumPy's calls would take longer than the loop
            freed = 0
            for page in pages.tolist():
                count = int(self._refs[page]) - 1
                assert count >= 0, "freed a free page"
                self._refs[page] = count
                freed += count == 0
        else:
            np.subtract.at(self._refs, pages, 1)
            counts = self._refs[pages]
            assert (counts >= 0).all(), "freed a free page"
            freed = len(set(pages[counts == 0].tolist()))
        self.num_free += freed
        self.num_freed += freed

    def num_references(self, pages: Pages) -> NDArray[np.int32]:
        """Return the number of references to each page."""
        return self._refs[pages]

    def reset(self, tables: Iterable[Pages]) -> None:
        """Drop all loans, and all references except those of some page tables."""
        self.end_all_loans()
        self._refs[:] = 0
        self._refs[0] = 1
        for table in tables:
            np.add.at(self._refs, table, 1)
        self.num_free = int((self._refs == 0).sum())

    def check(self, tables: Iterable[Pages]) -> None:
        """Assert that exactly `tables` hold the references, so that no page is leaked."""
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
    """A pool of pages with the tensors that store them.

    Attributes:
        layers: One LayerKV for each attention layer; layers may share one.
        tokens_S: int32, the id of the token whose key and value are in each cache slot.
        pool: Allocates the pages.
        states: States of recurrent layers; None for a model without such layers.
    """

    on_copy: Callable[[NDArray[np.int64], NDArray[np.int64]], None] | None = None
    """Called with the arguments of `copy_tokens` before tokens are copied."""

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_pages: int,
        page_size: int,
        states: StateCache | None = None,
    ) -> None:
        """Create a cache whose pages are all free.

        Args:
            layers: Keys and values of each layer, with num_pages + 1 pages (one is for padding).
            num_pages: Usable pages.
            page_size: Tokens per page.
            states: States of recurrent layers. Default: none.
        """
        self.layers = layers
        self.states = states
        # Layers may share tensors, and values may be a part of keys. Shared memory is copied once.
        pools = [tensor for layer in layers for tensor in (layer.values, layer.keys)]
        pools += [layer.index for layer in layers if layer.index is not None]
        self._pools = list({tensor.data_ptr(): tensor for tensor in pools}.values())
        self.page_size = page_size
        owned = [*self._pools, *(t for layer in states.layers for t in layer)] if states else pools
        device = owned[0].device if owned else torch.device("cpu")
        tokens = torch.zeros(num_pages + 1, page_size, dtype=torch.int32, device=device)
        self._pools.append(tokens)
        self.tokens_S: Tensor = tokens.view(-1)
        self.pool = PagePool(num_pages)

    def record_tokens(self, slots_T: Tensor, tokens_T: Tensor) -> None:
        """Record the token ids of the cache slots [T] into which a pass writes keys and values."""
        self.tokens_S.scatter_(0, slots_T, tokens_T.int())

    def copy_tokens(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy tokens, with their keys and values in all layers, between cache slots.

        A slot is page * page_size + offset.
        """
        if len(source) == 0:
            return
        if self.on_copy is not None:
            self.on_copy(source, target)
        device = self.tokens_S.device
        from_slots, to_slots = to_device(source, device), to_device(target, device)
        for pool in self._pools:
            # Some versions of torch cannot index 8-bit floats.
            slots = pool.view(torch.uint8) if pool.itemsize == 1 else pool
            slots = slots.view(-1, *pool.shape[2:])
            slots[to_slots] = slots[from_slots]


def table_slots(table: Pages, start: int, stop: int, page_size: int) -> NDArray[np.int64]:
    """Return the cache slots of the tokens `start` to `stop` of a page table.

    Args:
        table: Page ids.
        start: First token, counted from the first token of the table.
        stop: End of the tokens, exclusive.
        page_size: Tokens per page.
    """
    offsets = np.arange(start, stop)
    return table[offsets // page_size].astype(np.int64) * page_size + offsets % page_size


def write_kv(keys: Tensor, values: Tensor, slots_T: Tensor, k_TGK: Tensor, v_TGV: Tensor) -> None:
    """Store the keys and values of T tokens in a layer's pool.

    An FP8 pool stores them rounded, with numbers clamped to its range.

    Args:
        keys: Keys of the pool [pages, page_size, G, K]. Keys and values may be parts of one tensor.
        values: Values of the pool [pages, page_size, G, V].
        slots_T: Cache slot of each token [T], page * page_size + offset.
        k_TGK: New keys [T, G, K].
        v_TGV: New values [T, G, V].
    """
    # view, not flatten: if a pool is not contiguous, flatten would write into a copy.
    slots_k, slots_v = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
    is_dense = all(tensor.stride(2) == 1 for tensor in (slots_k, slots_v, k_TGK, v_TGV))
    kernels = None
    if is_dense and k_TGK.device.type == "cuda":
        kernels = import_kernels("treegen.ops.attention.gpu.kernels")
    if kernels is None:
        for pool, new in ((keys, k_TGK), (values, v_TGV)):
            write_slots(pool, slots_T, new)
        return
    num_tokens, num_heads, k_dim = k_TGK.shape
    v_dim = v_TGV.shape[2]
    kernels.write_slots[(num_tokens,)](
        k_TGK,
        v_TGV,
        slots_k,
        slots_v,
        slots_T,
        *k_TGK.stride()[:2],
        *v_TGV.stride()[:2],
        *slots_k.stride()[:2],
        *slots_v.stride()[:2],
        G=num_heads,
        K=k_dim,
        V=v_dim,
        BLOCK_G=_next_power_of_2(num_heads),
        BLOCK_K=_next_power_of_2(k_dim),
        BLOCK_V=_next_power_of_2(v_dim),
        MAX_VALUE=E4M3_MAX if keys.dtype == FP8 else 0.0,
        num_warps=4 if num_heads * k_dim > 512 else 1,
    )


def write_slots(pool: Tensor, slots_T: Tensor, new: Tensor) -> None:
    """Store the numbers of T tokens in a pool.

    Args:
        pool: Stored numbers [pages, page_size, ...]; in FP8 they are clamped and rounded.
        slots_T: Cache slot of each token [T].
        new: The numbers of the tokens [T, ...].
    """
    slots = pool.view(-1, *pool.shape[2:])
    if slots.dtype == FP8:
        new = new.clamp(-E4M3_MAX, E4M3_MAX).to(FP8).view(torch.uint8)
        slots = slots.view(torch.uint8)
    slots.index_copy_(0, slots_T, new.to(slots.dtype))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


_tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by address


def make_proxy(tensor: Tensor, dims: int) -> Tensor:
    """Return the first part of a tensor, from which `resolve_proxy` finds the tensor.

    Args:
        tensor: The tensor, which must stay referenced elsewhere while the proxy is used.
        dims: Number of leading dimensions that are dropped.
    """
    _tensors[tensor.data_ptr()] = tensor
    return tensor[(0,) * dims]


def resolve_proxy(part: Tensor) -> Tensor:
    """Return the tensor of a proxy."""
    return _tensors[part.data_ptr()]
