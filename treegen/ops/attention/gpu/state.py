"""Attention plans of a step on a GPU: work lists in device memory, by layer shape.

A decode step that is replayed as a CUDA graph reads its lists from memory with a fixed address.
Batch-invariant attention folds keys in, with one list for each level, launched in order. The
positions of keys alone determine where keys are cut, and to which part their sums belong.

Legend: G groups, U units.
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
from treegen.ops.attention.gpu.ragged import are_ragged, build_ragged_list
from treegen.ops.attention.gpu.work_units import (
    CAUSAL,
    HEIGHTS,
    HIGH,
    LOW,
    ORIGIN,
    PART_AT,
    START,
    STOP,
    TABLE,
    UNIT,
    WorkList,
    WorkShape,
    build_work_list,
    kind_of,
)
from treegen.ops.attention.level import HostLevel, IntArray, memoize


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A work list on the device, and the keys that it leaves to the dense kernel."""

    units: tuple[Tensor, ...]
    """The units of the work list."""
    last: Tensor
    """The units of the launch that merges; see `WorkList.last`."""
    pages: Tensor
    """The page ids of the work list."""
    host: WorkList
    """The work list on the host."""
    dense: DenseRun | None
    """The keys for the dense kernel; None for none."""
    memory: Tensor | None = None
    """One tensor that holds units, last and pages, if they will be overwritten; else None."""


class TritonState:
    """The levels of a step, and their work lists on the device, made at the first layer.

    Attributes:
        kernels: The kernel of each level in at least some layers; empty before a layer has run.
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
        return memoize(self._plans, (shape, live_rows), lambda: self._make_plan(shape, live_rows))

    def _make_plan(self, shape: WorkShape, live_rows: int) -> tuple[WorkList, DenseRun | None]:
        levels, processors = self.levels, count_processors(self.device)
        if self.invariant:
            return build_fold_list(levels, shape, processors), None
        if are_ragged(levels):
            return build_ragged_list(levels, shape, processors), None
        dense = find_run(levels, shape, live_rows, processors) if shape.may_be_dense else None
        dense_keys = (-1, 0) if dense is None else (dense.level, dense.num_keys)
        return build_work_list(levels, shape, live_rows, processors, dense_keys), dense

    def _name_kernels(self) -> None:
        names = ["invariant" if self.invariant else "triton"] * len(self.levels)
        for work in self._lists.values():
            if work.dense is not None:
                names[work.dense.level] = "cudnn"
        self.kernels = tuple(names)


class StaticState(TritonState):
    """Work lists in tensors with fixed addresses, for a CUDA graph to read.

    The tensors have spare capacity; units past the last one have no rows and cost almost nothing.
    """

    live_rows: int | None = None
    """Number of live rows of the step; None if the levels' groups contain the last one."""

    def work(self, shape: WorkShape) -> DeviceWork:
        """Return the work list for a layer's shape, with spare capacity for longer lists."""
        if shape not in self._lists:
            live_rows = live_rows_of(self.levels) if self.live_rows is None else self.live_rows
            host, dense = self.plan(shape, live_rows)
            capacities = [*(_round_up_size(len(array)) for array in host.units), len(host.last)]
            memory = torch.zeros(
                sum(capacities) * UNIT + 2 * _round_up_size(len(host.pages)),
                dtype=torch.int32,
                device=self.device,
            )
            *units, pages = memory.split(
                [capacity * UNIT for capacity in capacities] + [2 * _round_up_size(len(host.pages))]
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


def _round_up_size(count: int) -> int:
    return 0 if count == 0 else 1 << max(count - 1, 15).bit_length()


def _fits(work: WorkList, target: DeviceWork) -> bool:
    # A much larger graph would waste what it saves. Units that merge skip spare parts, but a
    # separate merge kernel reads them. A graph of complete lists marks no part empty.
    spare = target.host.num_parts - work.num_parts
    return (
        work.kinds == target.host.kinds
        and all(
            len(array) <= len(tensor) <= 4 * len(array) + 64
            for array, tensor in zip(work.units, target.units, strict=True)
        )
        and len(work.last) == len(target.last)
        and work.last_kind == target.host.last_kind
        and work.causal == target.host.causal
        and work.sees_all == target.host.sees_all
        and len(work.pages) <= len(target.pages)
        and (spare in (0, 1) or (spare > 1 and len(work.last) > 0))
        and (work.complete or not target.host.complete)
    )


def _copy(work: WorkList, target: DeviceWork, staging: StagingBuffer) -> None:
    assert target.memory is not None
    tables = [*zip(work.units, target.units, strict=True), (work.last, target.last)]
    size = sum(table.numel() for _, table in tables)

    def write(flat: NDArray[np.int32]) -> None:
        at = 0
        for array, table in tables:
            stop = at + array.size
            flat[at:stop] = array.reshape(-1)
            at += table.numel()
            flat[stop:at] = 0
        flat[size:] = work.pages

    staging.fill(target.memory, size + len(work.pages), write)


@cache
def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


PART = 4096  # positions of a part, whose keys are summed sequentially
_TALL = HEIGHTS[-1]


def build_fold_list(levels: Sequence[HostLevel], shape: WorkShape, processors: int) -> WorkList:
    """Cut levels into units: row blocks of one height per level, times the parts of their keys.

    Args:
        levels: The levels.
        shape: Layer properties on which the list depends.
        processors: Multiprocessors of the GPU.
    """
    tables, kinds = [], []
    offset, parts = 0, 1
    for index, level in enumerate(levels):
        key = "fold", shape.kv_heads, shape.per_head, processors, shape.max_height, offset
        if key not in level.memo:
            kind = _kind_of(level, shape, processors)
            level.memo[key] = _units(level, kind, shape.per_head, offset), kind
        table, kind = level.memo[key]
        parts = max(parts, int(table[:, PART_AT].max(initial=0)) + 1)
        if index == len(levels) - 1:
            table = np.concatenate([table, _idle_rows(table, shape.num_rows)])
        tables.append(table)
        kinds.append(kind)
        offset += level.pages_GP.size
    return WorkList(
        units=tuple(tables),
        kinds=tuple(kinds),
        pages=np.concatenate([level.pages_GP.reshape(-1) for level in levels]),
        num_parts=parts,
        causal=any(level.causal for level in levels),
        sees_all=tuple(not level.causal for level in levels),
    )


def _kind_of(level: HostLevel, shape: WorkShape, processors: int) -> int:
    """Return the index of the height of a level's units; the height does not affect any bit."""
    rows_G, keys_G = level.stop_G - level.start_G, level.kv_len_G
    groups = (rows_G > 0) & (keys_G > 0)
    rows_G, keys_G = rows_G[groups], keys_G[groups]
    # Units of fewer than 16 rows use no matrix product, and would sum in another order.
    kind = max(kind_of(rows_G * shape.per_head, keys_G, shape.max_height), 1)
    blocks = int((-(-rows_G // max(HEIGHTS[kind] // shape.per_head, 1))).sum())
    parts = -(-int((level.kv_start_G[groups] + keys_G).max(initial=1)) // PART)
    # Keys are not split further, so few tall units would leave most processors idle.
    if HEIGHTS[kind] == _TALL and blocks * shape.kv_heads * parts < processors:
        return kind - 1
    return kind


def _units(level: HostLevel, kind: int, per_head: int, offset: int) -> IntArray:
    """Return the units of a level [U, 9], all of one height."""
    rows_G, keys_G, origin_G = level.stop_G - level.start_G, level.kv_len_G, level.kv_start_G
    groups = np.flatnonzero((rows_G > 0) & (keys_G > 0))
    height = max(HEIGHTS[kind] // per_head, 1)
    group, block = _repeat(groups, -(-rows_G[groups] // height))
    first, last = origin_G[group] // PART, (origin_G + keys_G - 1)[group] // PART
    at, part = _repeat(np.arange(len(group)), last - first + 1)
    group, block, part = group[at], block[at], part + first[at]
    table = np.zeros((len(group), UNIT), dtype=np.int64)
    table[:, PART_AT] = part
    table[:, START] = level.start_G[group] + block * height
    table[:, STOP] = np.minimum(table[:, START] + height, level.stop_G[group])
    table[:, TABLE] = offset + group * level.pages_GP.shape[1]
    table[:, LOW] = np.maximum(part * PART - origin_G[group], 0)
    table[:, HIGH] = np.minimum((part + 1) * PART - origin_G[group], keys_G[group])
    table[:, ORIGIN] = origin_G[group]
    table[:, CAUSAL] = level.causal
    return table


def _repeat(values: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Repeat each value `counts` times; also return the index of each repetition."""
    again = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(values, counts), again


def _idle_rows(table: IntArray, num_rows: int) -> IntArray:
    """Return a unit without keys for each row that has no unit in a table.

    The last launch then writes the results of levels above for these rows too.
    """
    covered = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(covered, table[:, START], 1)
    np.add.at(covered, table[:, STOP], -1)
    rows = np.flatnonzero(covered[:-1].cumsum() == 0)
    idle = np.zeros((len(rows), UNIT), dtype=np.int64)
    idle[:, START], idle[:, STOP] = rows, rows + 1
    return idle
