"""Attention plans of a step on a GPU: work lists in device memory, by layer shape.

A decode step that is replayed as a CUDA graph reads its lists from memory with a fixed address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import StagingBuffer, to_device_together
from treegen.ops.attention.gpu.dense import DenseRun, find_run
from treegen.ops.attention.gpu.fold import build_fold_list
from treegen.ops.attention.gpu.ragged import are_ragged, build_ragged_list
from treegen.ops.attention.gpu.units import UNIT, WorkList, WorkShape, build_work_list
from treegen.ops.attention.level import HostLevel


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A work list on the device, and the keys that it leaves to the dense kernel.

    units, last, pages: the arrays of the work list.
    host: the work list on the host.
    dense: the keys for the dense kernel; None for none.
    memory: one tensor that holds units, last and pages, if they will be overwritten; else None.
    """

    units: tuple[Tensor, ...]
    last: Tensor
    pages: Tensor
    host: WorkList
    dense: DenseRun | None
    memory: Tensor | None = None


class TritonState:
    """The levels of a step, and their work lists on the device, made at the first layer.

    kernels: the kernel of each level in at least some layers; empty before a layer has run.
    """

    def __init__(
        self, levels: tuple[HostLevel, ...], device: torch.device, *, invariant: bool = False
    ) -> None:
        """Create a state without work lists.

        Args:
            levels: The levels, on the host.
            device: Where the tensors of the layers are.
            invariant: Whether keys are folded in sequentially, see `build_fold_list`.
        """
        self.levels, self.device, self.invariant = levels, device, invariant
        self.kernels: tuple[str, ...] = ()
        self._lists: dict[WorkShape, DeviceWork] = {}
        self._plans: dict[tuple[WorkShape, int], tuple[WorkList, DenseRun | None]] = {}

    def work(self, shape: WorkShape) -> DeviceWork:
        """Return the work list for a layer's shape."""
        if shape not in self._lists:
            host, dense = self.plan(shape, shape.num_rows)
            arrays = [array.astype(np.int32) for array in (*host.units, host.last, host.pages)]
            *units, last, pages = to_device_together(arrays, self.device)
            self._lists[shape] = DeviceWork(tuple(units), last, pages, host, dense)
            self._name_kernels()
        return self._lists[shape]

    def plan(self, shape: WorkShape, live_rows: int) -> tuple[WorkList, DenseRun | None]:
        """Return the work list for a shape, and the keys that are left to cuDNN.

        Args:
            shape: Layer properties on which the list depends.
            live_rows: Number of query rows without padding.
        """
        key = shape, live_rows
        if key not in self._plans:
            self._plans[key] = self._make_plan(shape, live_rows)
        return self._plans[key]

    def _make_plan(self, shape: WorkShape, live_rows: int) -> tuple[WorkList, DenseRun | None]:
        levels, processors = self.levels, _processors(self.device)
        if self.invariant:
            return build_fold_list(levels, shape, processors), None
        if are_ragged(levels):
            return build_ragged_list(levels, shape, processors), None
        dense = find_run(levels, shape, live_rows, processors) if shape.may_be_dense else None
        elsewhere = (-1, 0) if dense is None else (dense.level, dense.num_keys)
        return build_work_list(levels, shape, live_rows, processors, elsewhere), dense

    def _name_kernels(self) -> None:
        names = ["invariant" if self.invariant else "triton"] * len(self.levels)
        for work in self._lists.values():
            if work.dense is not None:
                names[work.dense.level] = "cudnn"
        self.kernels = tuple(names)


class StaticState(TritonState):
    """Work lists in tensors with fixed addresses, for a CUDA graph to read.

    The tensors have spare capacity; units past the last one have no rows and cost almost nothing.

    live_rows: number of live rows of the step; None if the levels' groups contain the last one.
    """

    live_rows: int | None = None

    def work(self, shape: WorkShape) -> DeviceWork:
        """Return the work list for a layer's shape, with spare capacity for longer lists."""
        if shape not in self._lists:
            live_rows = live_rows_of(self.levels) if self.live_rows is None else self.live_rows
            host, dense = self.plan(shape, live_rows)
            rooms = [*(_room(len(array)) for array in host.units), len(host.last)]
            memory = torch.zeros(
                sum(rooms) * UNIT + 2 * _room(len(host.pages)),
                dtype=torch.int32,
                device=self.device,
            )
            *units, pages = memory.split(
                [room * UNIT for room in rooms] + [2 * _room(len(host.pages))]
            )
            *units, last = (table.view(-1, UNIT) for table in units)
            self._lists[shape] = DeviceWork(tuple(units), last, pages, host, dense, memory)
            _copy(host, self._lists[shape], StagingBuffer(1))
            self._name_kernels()
        return self._lists[shape]

    def load(
        self, other: TritonState, staging: StagingBuffer, live_rows: int | None = None
    ) -> bool:
        """Replace the levels by those of another state; False, and no change, if they do not fit.

        Args:
            other: The state with the new levels.
            staging: Buffer through which the lists are copied to the device.
            live_rows: As in the class.
        """
        live_rows = live_rows_of(other.levels) if live_rows is None else live_rows
        plans = {shape: other.plan(shape, live_rows) for shape in self._lists}
        for shape, (work, dense) in plans.items():
            if dense != self._lists[shape].dense or not _fits(work, self._lists[shape]):
                return False
        self.levels, self._plans = other.levels, other._plans
        for shape, (work, _) in plans.items():
            _copy(work, self._lists[shape], staging)
        self._name_kernels()
        return True


def live_rows_of(levels: Sequence[HostLevel]) -> int:
    """Return the number of rows up to the last one that a group of some level contains."""
    return max(int(level.stop_G.max(initial=0)) for level in levels)


def _room(count: int) -> int:
    return 0 if count == 0 else 1 << max(count - 1, 15).bit_length()


def _fits(work: WorkList, room: DeviceWork) -> bool:
    # A much larger graph would waste what it saves. Units that merge skip spare parts, but a
    # separate merge kernel reads them. A graph of complete lists marks no part empty.
    spare = room.host.num_parts - work.num_parts
    return (
        work.kinds == room.host.kinds
        and all(
            len(array) <= len(tensor) <= 4 * len(array) + 64
            for array, tensor in zip(work.units, room.units, strict=True)
        )
        and len(work.last) == len(room.last)
        and work.last_kind == room.host.last_kind
        and work.causal == room.host.causal
        and len(work.pages) <= len(room.pages)
        and (spare in (0, 1) or (spare > 1 and len(work.last) > 0))
        and (work.complete or not room.host.complete)
    )


def _copy(work: WorkList, room: DeviceWork, staging: StagingBuffer) -> None:
    assert room.memory is not None
    tables = [*zip(work.units, room.units, strict=True), (work.last, room.last)]
    size = sum(table.numel() for _, table in tables)

    def write(flat: NDArray[np.int32]) -> None:
        at = 0
        for array, table in tables:
            stop = at + array.size
            flat[at:stop] = array.reshape(-1)
            at += table.numel()
            flat[stop:at] = 0
        flat[size:] = work.pages

    staging.fill(room.memory, size + len(work.pages), write)


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
