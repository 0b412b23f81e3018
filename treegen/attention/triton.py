"""Attention over levels on a GPU: one Triton kernel over a work list, and one merge.

Legend: T query rows, H query heads, V value dimension, P parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from treegen.attention.level import HostLevel, IntArray, Level, to_host
from treegen.attention.triton_kernels import attend_units, merge_parts
from treegen.attention.triton_units import HEIGHTS, WorkList, work_list
from treegen.attention.types import KVPair, Options, Prepared
from treegen.errors import InputError
from treegen.transfer import staged, to_device

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A work list on the device. complete: see `WorkList`."""

    units: tuple[Tensor, ...]
    pages: Tensor
    num_parts: int
    complete: bool


class TritonState:
    """A step's levels, and its work lists on the device, made at the first layer."""

    def __init__(self, levels: tuple[HostLevel, ...], device: torch.device) -> None:
        self.levels, self.device = levels, device
        self._lists: dict[tuple[int, int, int], DeviceWork] = {}

    def work(self, num_rows: int, kv_heads: int, per_head: int) -> DeviceWork:
        """The work list for a layer's shape."""
        key = num_rows, kv_heads, per_head
        if key not in self._lists:
            work = work_list(self.levels, *key, _programs(self.device))
            units = tuple(self._to_device(array) for array in work.units)
            pages = self._to_device(work.pages)
            self._lists[key] = DeviceWork(units, pages, work.num_parts, work.complete)
        return self._lists[key]

    def _to_device(self, array: IntArray) -> Tensor:
        return to_device(array.astype(np.int32), self.device)


class StaticState(TritonState):
    """Work lists in tensors that stay where they are, for a CUDA graph to read.

    They have room to spare; units past the last one have no rows and cost next to nothing.
    """

    def work(self, num_rows: int, kv_heads: int, per_head: int) -> DeviceWork:
        """The work list for a layer's shape, with room for longer ones."""
        key = num_rows, kv_heads, per_head
        if key not in self._lists:
            work = work_list(self.levels, *key, _programs(self.device))
            units = tuple(self._zeros(_room(len(array)), 8) for array in work.units)
            pages = self._zeros(2 * _room(len(work.pages)))
            self._lists[key] = DeviceWork(units, pages, work.num_parts, complete=False)
            _copy(work, self._lists[key])
        return self._lists[key]

    def load(self, levels: tuple[HostLevel, ...]) -> bool:
        """Put other levels in place; False, with nothing changed, if they do not fit."""
        lists = {key: work_list(levels, *key, _programs(self.device)) for key in self._lists}
        for key, work in lists.items():
            if not _fits(work, self._lists[key]):
                return False
        for key, work in lists.items():
            _copy(work, self._lists[key])
        self.levels = levels
        return True

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _room(count: int) -> int:
    return 0 if count == 0 else 1 << max(count - 1, 15).bit_length()


def _fits(work: WorkList, room: DeviceWork) -> bool:
    # A much larger graph would waste what it saves.
    return (
        all(
            len(array) <= len(tensor) <= 4 * len(array) + 64
            for array, tensor in zip(work.units, room.units, strict=True)
        )
        and len(work.pages) <= len(room.pages)
        and work.num_parts <= room.num_parts <= work.num_parts + 1
    )


def _copy(work: WorkList, room: DeviceWork) -> None:
    for array, tensor in zip(work.units, room.units, strict=True):
        padded = np.zeros(tensor.shape, dtype=np.int32)
        padded[: len(array)] = array
        tensor.copy_(staged(padded, tensor.device), non_blocking=True)
    pages = staged(work.pages.astype(np.int32), room.pages.device)
    room.pages[: len(pages)].copy_(pages, non_blocking=True)


class Triton:
    """One kernel for shared levels, own keys and prefill alike; 16-bit and float32 tensors."""

    name = "triton"

    def refusal(self, device: torch.device) -> str | None:
        """Runs on CUDA devices, and anywhere in Triton's interpreter."""
        if device.type == "cuda" or _INTERPRETED:
            return None
        return f"takes CUDA tensors, got {device}"

    def prepare(
        self, levels: Sequence[Level], host: Sequence[HostLevel] | None, positions_T: Tensor | None
    ) -> TritonState:
        """Keep the host arrays; work lists need the head count, known at the first layer."""
        arrays = tuple(host) if host is not None else tuple(to_host(level) for level in levels)
        return TritonState(arrays, levels[0].q_start_G.device)

    def attend(
        self, q_THD: Tensor, pairs: Sequence[KVPair], prepared: Prepared, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Partial results of all levels in float32, merged in float32, rounded once."""
        keys, values = pairs[0]
        if any(pair[0] is not keys or pair[1] is not values for pair in pairs):
            raise InputError("impl 'triton' takes one pool for all levels; use 'reference'")
        if q_THD.dtype == torch.float64:
            raise InputError("impl 'triton' computes in float32; use 'reference' for float64")
        (num_rows, q_heads, _), v_dim = q_THD.shape, values.shape[3]
        out_THV = q_THD.new_empty(num_rows, q_heads, v_dim)
        lse_TH = q_THD.new_empty(num_rows, q_heads, dtype=torch.float32)
        if num_rows == 0:
            return out_THV, lse_TH
        state: TritonState = prepared.state
        work = state.work(num_rows, keys.shape[2], q_heads // keys.shape[2])
        shape = work.num_parts, num_rows, q_heads
        part_PTHV = q_THD.new_empty(*shape, v_dim, dtype=torch.float32)
        part_PTH = q_THD.new_empty(shape, dtype=torch.float32)
        if not work.complete:
            part_PTH.fill_(-torch.inf)
        for units, height in zip(work.units, HEIGHTS, strict=True):
            if len(units):
                _launch(
                    units, height, q_THD, keys, values, work.pages, prepared.positions_T,
                    part_PTHV, part_PTH, options,
                )  # fmt: skip
        sinks = options.sinks_H
        merge_parts[(num_rows * q_heads,)](
            part_PTHV, part_PTH, part_PTH if sinks is None else sinks.contiguous(),
            out_THV, lse_TH, work.num_parts, q_heads,
            V=v_dim, BLOCK_V=triton.next_power_of_2(v_dim), HAS_SINKS=sinks is not None,
            num_warps=1,
        )  # fmt: skip
        return out_THV, lse_TH


def _launch(
    units: Tensor,
    height: int,
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions_T: Tensor | None,
    part_PTHV: Tensor,
    part_PTH: Tensor,
    options: Options,
) -> None:
    num_rows, q_heads, k_dim = q_THD.shape
    page_size, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
    per_head = q_heads // kv_heads
    # Slots of the pool are one dimension for the kernel; the last dimension must be dense.
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    slots_k, slots_v = keys.view(-1, kv_heads, k_dim), values.view(-1, kv_heads, v_dim)
    block_d = max(triton.next_power_of_2(k_dim), 16)
    block_v = max(triton.next_power_of_2(v_dim), 16)
    attend_units[(len(units), kv_heads)](
        q_THD, slots_k, slots_v, pages, units,
        units if positions_T is None else positions_T, part_PTHV, part_PTH,
        options.scale, options.window or 0, options.softcap or 0.0,
        q_THD.stride(0), q_THD.stride(1), slots_k.stride(0), slots_k.stride(1),
        slots_v.stride(0), slots_v.stride(1), num_rows,
        H=q_heads, PER_HEAD=per_head, D=k_dim, V=v_dim, BLOCK_D=block_d, BLOCK_V=block_v,
        PAGE=page_size, BLOCK_M=max(height, triton.next_power_of_2(per_head)),
        HAS_POSITIONS=positions_T is not None, HAS_WINDOW=options.window is not None,
        HAS_CAP=options.softcap is not None,
        **_tuning(height, max(block_d, block_v), q_THD.dtype),
    )  # fmt: skip


def _tuning(height: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block of keys, warps and pipeline stages for a height and head width."""
    large = width > 128 or dtype == torch.float32
    if height == HEIGHTS[0]:
        return {"BLOCK_N": 32, "num_warps": 2 if large else 1, "num_stages": 2}
    if not large:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 32, "num_warps": 4 if height == HEIGHTS[1] else 8, "num_stages": 2}


def _programs(device: torch.device) -> int:
    """Programs that fill the device: a few for each multiprocessor."""
    if device.type != "cuda":
        return 8
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
