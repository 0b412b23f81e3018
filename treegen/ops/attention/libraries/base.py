"""Attention over levels by a library's kernels for variable-length sequences.

A kernel computes units (see units.py): query rows with a run of keys that it reads in place, so
nothing is gathered, whatever the page size. Windows and causality are mostly expressed by the
choice of a unit's keys. If all rows of a unit see all its keys, the query heads of a key head count
as rows, so that each key is read once for all of them.

The kernels' own paths for pages, split keys and grouped heads have returned wrong LSEs. None of
them is used, except the one for grouped heads in causal units.

Legend: T query rows, N packed rows, H query heads, K key heads, R query heads per key head, D
dimension, U units, P parts, S slots.
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
from treegen.ops.attention.level import HostLevel, IntArray
from treegen.ops.attention.libraries import units as unit
from treegen.ops.attention.merge import add_sinks, merge_in_place
from treegen.ops.attention.types import NEEDS_AMPERE, AttentionOptions, KVPair, PreparedLevels

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
    """The window of a causal call whose kernel must hide keys; else None."""
    memo: dict[str, Any] = field(default_factory=dict)
    """Objects that a kernel derives from the units and other layers reuse."""

    @property
    def causal(self) -> bool:
        """Whether the last row of a unit sees all keys, and each row before it one key less."""
        return bool(self.units_U5[0, unit.CAUSAL])

    @property
    def max_q(self) -> int:
        """The largest number of packed rows of a unit."""
        return int(self.units_U5[:, unit.ROWS].max()) * self.folded

    @property
    def max_k(self) -> int:
        """The largest number of keys of a unit."""
        return int(self.units_U5[:, unit.KEYS].max())


class LibraryState:
    """The levels of a pass and their kernel calls.

    Calls are planned at the first layer of each shape and window.
    """

    def __init__(
        self, levels: tuple[HostLevel, ...], positions_T: Tensor | None, device: torch.device
    ) -> None:
        self._levels, self._positions_T, self._device = levels, positions_T, device
        self._calls: dict[Any, tuple[list[KernelCall], int]] = {}

    def calls(
        self, q_shape: tuple[int, ...], pools: tuple[Any, ...], window: int | None, bands: bool
    ) -> tuple[list[KernelCall], int]:
        """Return the calls, and the largest number of partial results of a row.

        Args:
            q_shape: Shape of the queries [T, H, D].
            pools: Shape of each level's keys [pages, page_size, K, D].
            window: Number of positions that a row sees, its own included; None for all.
            bands: As in `units.cut_level`.
        """
        key = q_shape, pools, window
        if key not in self._calls:
            self._calls[key] = self._plan(q_shape, pools, window, bands)
        return self._calls[key]

    def _plan(
        self, q_shape: tuple[int, ...], pools: tuple[Any, ...], window: int | None, bands: bool
    ) -> tuple[list[KernelCall], int]:
        num_rows, q_heads, _ = q_shape
        positions_T = None
        if window is not None or any(level.causal for level in self._levels):
            assert self._positions_T is not None
            positions_T = self._positions_T.cpu().numpy().astype(np.int64)
        tables: list[tuple[int, int, IntArray]] = []
        for index, (_, page_size, kv_heads, _) in enumerate(pools):
            level, per_head = self._levels[index], q_heads // kv_heads
            longest = unit.pages_per_unit(
                level, page_size, per_head, kv_heads, _programs(self._device)
            )
            units_U5 = unit.cut_level(level, page_size, longest, positions_T, window, bands=bands)
            # A kernel's grid has as many blocks for every unit as for the largest one, so units
            # with a single row get separate calls.
            kind_U = np.where(units_U5[:, unit.CAUSAL] == 1, 2, units_U5[:, unit.ROWS] > 1)
            for kind in range(3):
                chosen_U5 = units_U5[kind_U == kind]
                for at in range(0, len(chosen_U5), MAX_UNITS):
                    fold = 1 if kind == 2 else per_head
                    tables.append((index, fold, chosen_U5[at : at + MAX_UNITS]))
        rows = [
            unit.concat_ranges(table[:, unit.ROW], table[:, unit.ROWS]) for _, _, table in tables
        ]
        rows_N = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        part_N = unit.count_earlier(rows_N)
        packed_2N = to_device(np.stack([rows_N, part_N * num_rows + rows_N]), self._device)
        calls = []
        for (index, fold, units_U5), rows_2N in zip(
            tables, packed_2N.split([len(array) for array in rows], dim=1), strict=True
        ):
            ends_3U = np.zeros((3, len(units_U5) + 1), dtype=np.int32)
            ends_3U[0, 1:] = units_U5[:, unit.ROWS].cumsum() * fold
            ends_3U[1:, :-1] = units_U5[:, [unit.SLOT, unit.KEYS]].T
            hides = bands and bool(units_U5[0, unit.CAUSAL])
            on_device = to_device(ends_3U, self._device)
            calls.append(
                KernelCall(index, fold, units_U5, rows_2N, on_device, window if hides else None)
            )
        return calls, int(part_N.max(initial=0)) + 1


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

    def run(
        self,
        q_NHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        call: KernelCall,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return out [N, H, D] and LSE [H, N] in float32 of a call's units.

        Args:
            q_NHD: Packed queries [N, H, D].
            k_SKD: Keys of the pool [S, K, D].
            v_SKD: Values of the pool [S, K, D].
            call: The units to compute.
            options: Softmax options of the layer.
        """
        raise NotImplementedError

    def refusal(self, device: torch.device) -> str | None:
        """Return None for an NVIDIA GPU since Ampere, and the reason for refusal otherwise."""
        if device.type != "cuda" or torch.version.hip is not None:
            return f"takes tensors on an NVIDIA GPU, got {device}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return NEEDS_AMPERE
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> LibraryState:
        """Store the levels; units depend on the layer's heads and window.

        Args:
            levels: The levels, on the host.
            positions_T: Position of each query row [T]; None if nothing needs positions.
            device: Where the tensors of the layers are.
        """
        return LibraryState(tuple(levels), positions_T, device)

    def attend(
        self,
        q_THD: Tensor,
        pairs: Sequence[KVPair],
        prepared: PreparedLevels,
        options: AttentionOptions,
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
        state: LibraryState = prepared.state
        pools = tuple(keys.shape for keys, _ in pairs)
        calls, num_parts = state.calls(q_THD.shape, pools, options.window, self.windows)
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
        out_NHD, lse_HN = self.run(q_NHD, k_SKD, v_SKD, call, options)
        want = q_NHD.shape[1], q_NHD.shape[0]
        if lse_HN.shape != want:
            raise InputError(
                f"impl {self.name!r}: its LSE has shape {tuple(lse_HN.shape)}, not [heads, rows] "
                f"{want}; use another version of the library"
            )
        out_NKRD = out_NHD.unflatten(0, (-1, fold)).transpose(1, 2)
        lse_NKR = lse_HN.unflatten(1, (-1, fold)).transpose(0, 1)
        return out_NKRD.flatten(1, 2), lse_NKR.flatten(1, 2)

    def _check(self, q_THD: Tensor, pairs: Sequence[KVPair], options: AttentionOptions) -> None:
        k_dim, v_dim = q_THD.shape[2], pairs[0][1].shape[3]
        problem = None
        if q_THD.dtype not in self.dtypes:
            problem = f"takes {' and '.join(map(str, self.dtypes))}, got {q_THD.dtype}"
        elif k_dim != v_dim or k_dim % 8 or k_dim > 256:
            widths = f"got {k_dim} and {v_dim}"
            problem = f"takes keys and values of one width, a multiple of 8 up to 256, {widths}"
        elif options.softcap is not None and not self.softcaps:
            problem = f"takes no softcap with the kernels installed, got {options.softcap}"
        if problem is not None:
            raise InputError(f"impl {self.name!r} {problem}; use 'triton' or 'reference'")


def _programs(device: torch.device) -> int:
    """Return how many blocks of a kernel fill the device."""
    if device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
