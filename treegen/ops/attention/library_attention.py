"""Attention over levels by a library's kernels for variable-length sequences.

A kernel computes units. A unit is a run of consecutive query rows and a run of consecutive slots of
the pool, which the kernel reads in place, so nothing is gathered, whatever the page size. Either
all rows of a unit see all its keys, or it is causal: the last row sees up to the last key, and each
row before it one key less. A window then counts back from the last key that a row sees. If all rows
see all keys, the query heads of a key head count as rows, so that each key is read once for all of
them.

The kernels' own paths for pages, split keys and grouped heads have returned wrong LSEs. None of
them is used, except the one for grouped heads in causal units.

Legend: G groups, P used pages of all groups or parts, R runs of slots or query heads per key head,
T query rows, N rows of all runs or packed rows, H query heads, K key heads, D dimension, U units,
S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.errors import InputError
from treegen.ops.attention.level import HostLevel, IntArray, memoize
from treegen.ops.attention.merge import add_sinks, merge_in_place
from treegen.ops.attention.types import (
    NEEDS_AMPERE,
    AttentionOptions,
    KVPair,
    KVPairs,
    PreparedLevels,
    Window,
)

# Columns of a unit: first row, number of rows, first slot, number of keys, whether it is causal.
ROW, ROWS, SLOT, KEYS, CAUSAL = range(5)

_BLOCK_ROWS = 128  # rows that one block of a kernel computes
_KEYS_PER_SPLIT = 256  # smallest length to which runs are cut


def cut_level(
    level: HostLevel,
    page_size: int,
    max_pages: int,
    positions_T: IntArray | None,
    window: Window | None,
    *,
    bands: bool,
) -> IntArray:
    """Return the units [U, 5] of a level.

    Args:
        level: The level.
        page_size: Cache slots per page.
        max_pages: Largest number of pages of a unit.
        positions_T: Position of each query row [T]; needed if the level is causal or there is a
            window.
        window: The positions that a row sees; None for all.
        bands: Whether a causal unit may have a window that hides keys. If not, each row from which
            the window hides other keys becomes a separate unit.
    """
    runs_R6 = _runs(level, page_size, max_pages)
    if positions_T is None or not (level.causal or window is not None):
        return runs_R6[:, :5]
    row, rows, slot, keys, _, position = runs_R6.T
    run_N = np.repeat(np.arange(len(runs_R6)), rows)
    row_N = concat_ranges(row, rows)
    # N counts rows of runs. offset_N is the position of the row, counted from the first key of its
    # run. The row sees the keys of the run from low_N up to, not including, high_N.
    offset_N = positions_T[row_N] - position[run_N]
    high_N = np.clip(offset_N + 1, 0, keys[run_N]) if level.causal else keys[run_N]
    low_N = np.zeros_like(high_N)
    if window is not None:
        low_N = np.maximum(window.start(positions_T[row_N]) - position[run_N], 0)
    has_keys = low_N < high_N
    run_N, row_N, offset_N, low_N, high_N = (
        array[has_keys] for array in (run_N, row_N, offset_N, low_N, high_N)
    )
    # Which keys of the same run the next row sees: 1 the same keys; 2 one key more; 0 otherwise.
    is_next = (np.diff(run_N) == 0) & (np.diff(row_N) == 1)
    lower, higher = np.diff(low_N), np.diff(high_N)
    step = is_next & (np.diff(offset_N) == 1) & (higher == 1) & (high_N[1:] == offset_N[1:] + 1)
    kind = 2 * (step if bands else step & (lower == 0)) + (is_next & (lower == 0) & (higher == 0))
    ends = kind == 0
    ends[1:] |= (kind[1:] != kind[:-1]) & (kind[:-1] != 0)
    first_U = np.flatnonzero(np.append(True, ends)[: len(row_N)])
    last_U = np.append(first_U[1:], len(row_N))[: len(first_U)] - 1
    causal_U = (first_U < last_U) & (np.append(kind, 0)[first_U] == 2)
    low_U = low_N[first_U]
    columns = (
        row_N[first_U],
        last_U - first_U + 1,
        slot[run_N[first_U]] + low_U,
        high_N[last_U] - low_U,
        causal_U,
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _runs(level: HostLevel, page_size: int, max_pages: int) -> IntArray:
    """Return runs of consecutive pages as units, with the position of the first key: [R, 6]."""
    rows_G = level.stop_G - level.start_G
    used_G = np.where(rows_G > 0, -(-level.kv_len_G // page_size), 0)
    group_P = np.repeat(np.arange(len(used_G)), used_G)
    index_P = concat_ranges(np.zeros_like(used_G), used_G)
    page_P = level.pages_GP[group_P, index_P]
    starts = index_P % max_pages == 0  # true for the first page of each group too
    starts[1:] |= np.diff(page_P) != 1
    at_R = np.flatnonzero(starts)
    group_R, low_R = group_P[at_R], index_P[at_R] * page_size
    pages_R = np.diff(np.append(at_R, len(page_P)))
    keys_R = np.minimum(pages_R * page_size, level.kv_len_G[group_R] - low_R)
    columns = (
        level.start_G[group_R],
        rows_G[group_R],
        page_P[at_R] * page_size,
        keys_R,
        np.zeros_like(keys_R),
        level.kv_start_G[group_R] + low_R,
    )
    return np.stack(columns, axis=1)


def pages_per_unit(
    level: HostLevel, page_size: int, per_head: int, kv_heads: int, num_programs: int
) -> int:
    """Return the largest number of pages of a unit, so that long groups are cut to fill the device.

    Args:
        level: The level.
        page_size: Cache slots per page.
        per_head: Query heads per key head.
        kv_heads: Key heads.
        num_programs: Number of blocks that fill the device.
    """
    blocks = kv_heads * int((-(-(level.stop_G - level.start_G) * per_head // _BLOCK_ROWS)).sum())
    splits = max(num_programs // max(blocks, 1), 1)
    keys = max(-(-int(level.kv_len_G.max(initial=0)) // splits), _KEYS_PER_SPLIT)
    return -(-keys // page_size)


def concat_ranges(start: IntArray, count: IntArray) -> IntArray:
    """Return the ranges of `count` numbers from each `start`, concatenated."""
    return np.arange(count.sum()) + np.repeat(start - (count.cumsum() - count), count)


def count_earlier(values: IntArray) -> IntArray:
    """Return, for each value, how many equal values precede it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    counts = np.empty_like(values)
    counts[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return counts


MAX_UNITS: Final = 65_535  # the second dimension of a CUDA grid


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One call of a kernel, with units of one level."""

    level: int
    """The index of the level."""
    folded: int
    """Number of query heads that count as rows."""
    units_U5: IntArray
    """The units, on the host."""
    rows_2N: Tensor
    """The query row of each packed row, and its index among all partial results."""
    ends_3U: Tensor
    """int32 [3, U + 1]: where the packed rows of each unit start (the last entry: where those of
    the last unit end), its first slot, and its number of keys."""
    window: int | None
    """The size of the window of a causal call whose kernel must hide keys; else None."""
    memo: dict[str, Any] = field(default_factory=dict)
    """Objects that a kernel derives from the units and other layers reuse."""

    @property
    def causal(self) -> bool:
        """Whether the last row of a unit sees all keys, and each row before it one key less."""
        return bool(self.units_U5[0, CAUSAL])

    @property
    def max_q(self) -> int:
        """The largest number of packed rows of a unit."""
        return int(self.units_U5[:, ROWS].max()) * self.folded

    @property
    def max_k(self) -> int:
        """The largest number of keys of a unit."""
        return int(self.units_U5[:, KEYS].max())


def plan_calls(
    prepared: PreparedLevels,
    q_shape: tuple[int, ...],
    pools: tuple[Any, ...],
    window: Window | None,
    bands: bool,
) -> tuple[list[KernelCall], int]:
    """Return the kernel calls of a layer, and the largest number of partial results of a row.

    Args:
        prepared: The levels.
        q_shape: Shape of the queries [T, H, D].
        pools: Shape of each level's keys [pages, page_size, K, D].
        window: The positions that a row sees; None for all.
        bands: As in `cut_level`.
    """
    # All rows of a unit have one chunk, so only windows may form bands.
    bands = bands and not (window is not None and window.is_chunk)
    num_rows, q_heads, _ = q_shape
    positions_T = None
    if window is not None or any(level.causal for level in prepared.levels):
        assert prepared.state is not None
        positions_T = prepared.state.cpu().numpy().astype(np.int64)
    tables: list[tuple[int, int, IntArray]] = []
    for index, (_, page_size, kv_heads, _) in enumerate(pools):
        level, per_head = prepared.levels[index], q_heads // kv_heads
        max_pages = pages_per_unit(level, page_size, per_head, kv_heads, _programs(prepared.device))
        units_U5 = cut_level(level, page_size, max_pages, positions_T, window, bands=bands)
        # A kernel's grid has as many blocks for every unit as for the largest one, so units
        # with a single row get separate calls.
        kind_U = np.where(units_U5[:, CAUSAL] == 1, 2, units_U5[:, ROWS] > 1)
        for kind in range(3):
            chosen_U5 = units_U5[kind_U == kind]
            for at in range(0, len(chosen_U5), MAX_UNITS):
                fold = 1 if kind == 2 else per_head
                tables.append((index, fold, chosen_U5[at : at + MAX_UNITS]))
    rows = [concat_ranges(table[:, ROW], table[:, ROWS]) for _, _, table in tables]
    rows_N = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    part_N = count_earlier(rows_N)
    packed_2N = to_device(np.stack([rows_N, part_N * num_rows + rows_N]), prepared.device)
    calls = []
    for (index, fold, units_U5), rows_2N in zip(
        tables, packed_2N.split([len(array) for array in rows], dim=1), strict=True
    ):
        ends_3U = np.zeros((3, len(units_U5) + 1), dtype=np.int32)
        ends_3U[0, 1:] = units_U5[:, ROWS].cumsum() * fold
        ends_3U[1:, :-1] = units_U5[:, [SLOT, KEYS]].T
        hides = bands and bool(units_U5[0, CAUSAL])
        size = None if window is None else window.size
        on_device = to_device(ends_3U, prepared.device)
        calls.append(KernelCall(index, fold, units_U5, rows_2N, on_device, size if hides else None))
    return calls, int(part_N.max(initial=0)) + 1


QKV = tuple[Tensor, Tensor, Tensor]
"""Packed queries [N, H, D], and keys and values of the pool [S, K, D]."""


class Library:
    """Attention by a library. A subclass names the library and calls its kernel."""

    name: str
    """Its name in `impl=`."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    """The types in which the kernel computes."""
    softcaps = False
    """Whether the kernel supports a softcap."""
    windows = True
    """Whether the kernel supports windows. If not, consecutive rows share a unit only if the window
    hides the same keys from them."""

    def run(self, qkv: QKV, call: KernelCall, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """Return out [N, H, D] and LSE [H, N] in float32 of a call's units.

        Args:
            qkv: Packed queries [N, H, D], and keys and values of the pool [S, K, D].
            call: The units to compute.
            options: Softmax options of the layer.
        """
        raise NotImplementedError

    def refusal(self, device: torch.device) -> str | None:
        """Return None for an NVIDIA GPU since Ampere, and the reason for refusal otherwise."""
        if device.type != "cuda" or torch.version.hip is not None:
            return f"requires tensors on an NVIDIA GPU, got {device}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return NEEDS_AMPERE
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the positions; units depend on the layer's heads and window.

        Args:
            levels: The levels, on the host.
            positions_T: Position of each query row [T]; None if nothing needs positions.
            device: Where the tensors of the layers are.
        """
        return positions_T

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Compute all units, then merge. The kernel rounds its results; the merge is float32.

        Args:
            q_THD: Queries [T, H, D].
            pairs: Keys and values of each level.
            prepared: The levels.
            options: Softmax options of the layer.

        Returns:
            Results [T, H, D] in the type of q, and LSE [T, H] in float32.

        Raises:
            InputError: the kernel does not support the tensors or options.
        """
        self._check(q_THD, pairs, options)
        layer = q_THD.shape, tuple(keys.shape for keys, _ in pairs), options.window
        calls, num_parts = memoize(
            prepared.memo, ("calls", *layer), lambda: plan_calls(prepared, *layer, self.windows)
        )
        # If a row has fewer parts than num_parts, its remaining parts stay empty: LSE -inf, out 0.
        part_PTHD = q_THD.new_zeros(num_parts, *q_THD.shape, dtype=torch.float32)
        part_PTH = q_THD.new_full((num_parts, *q_THD.shape[:2]), -torch.inf, dtype=torch.float32)
        for call in calls:
            out_NHD, lse_NH = self._run(q_THD, pairs[call.level], call, options)
            part_PTHD.flatten(0, 1).index_copy_(0, call.rows_2N[1], out_NHD.float())
            part_PTH.flatten(0, 1).index_copy_(0, call.rows_2N[1], lse_NH)
        out_THD, lse_TH = merge_in_place(part_PTHD, part_PTH)
        if options.sinks_H is not None:
            out_THD, lse_TH = add_sinks(out_THD, lse_TH, options.sinks_H)
        return out_THD.to(q_THD.dtype), lse_TH

    def _run(
        self, q_THD: Tensor, pair: KVPair, call: KernelCall, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Return out [N, H, D] and LSE [N, H] of a call, for N query rows and all query heads."""
        k_SKD, v_SKD = (pool.view(-1, *pool.shape[2:]) for pool in pair)
        fold = call.folded
        q_NRKD = q_THD[call.rows_2N[0]].unflatten(1, (-1, fold)).transpose(1, 2)
        q_NHD = q_NRKD.reshape(-1, q_THD.shape[1] // fold, q_THD.shape[2])
        out_NHD, lse_HN = self.run((q_NHD, k_SKD, v_SKD), call, options)
        expected = q_NHD.shape[1], q_NHD.shape[0]
        if lse_HN.shape != expected:
            raise InputError(
                f"impl {self.name!r} returned an LSE of shape {tuple(lse_HN.shape)}, expected "
                f"[heads, rows] {expected}; install another version of the library"
            )
        out_NKRD = out_NHD.unflatten(0, (-1, fold)).transpose(1, 2)
        lse_NKR = lse_HN.unflatten(1, (-1, fold)).transpose(0, 1)
        return out_NKRD.flatten(1, 2), lse_NKR.flatten(1, 2)

    def _check(self, q_THD: Tensor, pairs: KVPairs, options: AttentionOptions) -> None:
        k_dim, v_dim = q_THD.shape[2], pairs[0][1].shape[3]
        problem = None
        if q_THD.dtype not in self.dtypes:
            problem = f"supports only {' and '.join(map(str, self.dtypes))}, got {q_THD.dtype}"
        elif k_dim != v_dim or k_dim % 8 or k_dim > 256:
            widths = f"got {k_dim} and {v_dim}"
            problem = (
                "requires keys and values of the same width, which must be a multiple of 8 "
                f"up to 256, {widths}"
            )
        elif options.softcap is not None and not self.softcaps:
            problem = f"does not support softcap with the installed kernels, got {options.softcap}"
        if problem is not None:
            raise InputError(f"impl {self.name!r} {problem}; use 'triton' or 'reference'")


def _programs(device: torch.device) -> int:
    """Return how many blocks of a kernel fill the device."""
    if device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
