"""Tuning of the kernels over units: blocks, warps and pipeline stages that fit into memory."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from triton.runtime import driver

from treegen.errors import InputError, arg
from treegen.ops.attention.gpu.work_units import HEIGHTS

_ACCUMULATORS: Final = 128 << 10  # largest float32 results of a unit in bytes: half the registers
_MIN_KEYS: Final = 16  # smallest block of keys of a matrix product


def choose_tuning(
    height: int, width: int, dtype: torch.dtype, memory: int, *, few: bool = False
) -> dict[str, Any]:
    """Return the block of keys, warps and stages for a height and head width; see performance.md.

    The fastest choice on an H200 is reduced until it fits into shared memory.

    Args:
        height: Folded query rows of a unit.
        width: Width of the widest block of a head.
        dtype: Type of the queries.
        memory: Shared memory per program in bytes (`shared_memory`).
        few: Whether the launch has few programs (`work_units.are_few`).

    Raises:
        InputError: nothing fits.
    """
    chosen = _fastest(height, width, dtype, few)
    while height > HEIGHTS[0] and not _fits(height, width, dtype, memory, chosen):
        if few and chosen["num_stages"] == 2:  # large blocks need a second stage
            few, chosen = False, _fastest(height, width, dtype, False)
        elif not _reduce(chosen):
            raise InputError(
                f"a ratio of {height} query heads per key head and a head width of {width} need "
                f"more shared memory than this GPU has ({memory:,} bytes); use "
                f"{arg('impl', 'reference')}"
            )
    return chosen


def latent_tuning(height: int, width: int, dtype: torch.dtype, memory: int) -> dict[str, Any]:
    """Return the block of keys, warps and stages for latents, whose blocks are keys and values.

    Args:
        height: Folded query rows of a unit.
        width: Width of the block of latents.
        dtype: Type of the queries.
        memory: Shared memory per program in bytes.
    """
    if dtype == torch.float32 or width != 512:
        chosen = {"BLOCK_N": 16, "num_warps": 8 if height > HEIGHTS[1] else 4, "num_stages": 2}
    elif height < HEIGHTS[2]:
        # Two programs per multiprocessor, each with two blocks in flight.
        chosen = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    else:
        # Results fill half of the registers; queries and two blocks fill the shared memory.
        chosen = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    row_bytes = dtype.itemsize * (width + 64)  # with the rotated numbers
    while row_bytes * (height + chosen["num_stages"] * chosen["BLOCK_N"]) + 1024 > memory:
        if not _reduce(chosen):
            break
    return chosen


def _reduce(chosen: dict[str, Any]) -> bool:
    """Reduce stages or, with one stage, the block of keys; return False if both are minimal."""
    if chosen["num_stages"] > 1:
        chosen["num_stages"] -= 1
    elif chosen["BLOCK_N"] > _MIN_KEYS:
        chosen["BLOCK_N"] //= 2
    else:
        return False
    return True


def fold_tuning(
    height: int,
    width: int,
    dtype: torch.dtype,
    memory: int,
    *,
    few: bool = False,
    converts: bool = False,
) -> dict[str, Any]:
    """Return the block of keys, warps and stages for `fold_units`, which needs more registers.

    Args:
        height: Folded query rows of a unit.
        width: Width of the widest block of a head.
        dtype: Type of the queries.
        memory: Shared memory per program in bytes.
        few: Whether the launch has few programs (`work_units.are_few`).
        converts: Whether keys and values are stored in another type than queries.
    """
    chosen = choose_tuning(height, width, dtype, memory, few=few and not converts)
    if converts and height < HEIGHTS[2]:
        # Triton permutes converted keys in products of fewer than 64 rows, within blocks of 32.
        chosen["BLOCK_N"] = _MIN_KEYS
    if height >= HEIGHTS[2] and width <= 128 and dtype != torch.float32:
        warps = 8 if height == HEIGHTS[3] and width > 64 else 4
        chosen = {"BLOCK_N": 64, "num_warps": warps, "num_stages": 3}
        while not _fits(height, width, dtype, memory, chosen) and chosen["num_stages"] > 1:
            chosen["num_stages"] -= 1
    return chosen


@cache
def find_max_height(width: int, dtype: torch.dtype, memory: int) -> int:
    """Return the largest of HEIGHTS that can be computed at a head width.

    Args:
        width: Width of the widest block of a head.
        dtype: Type of the queries.
        memory: Shared memory per program in bytes.
    """
    min_config = {"BLOCK_N": _MIN_KEYS, "num_stages": 1}
    fitting = [
        height
        for height in HEIGHTS[2:]
        if height * width * 4 <= _ACCUMULATORS and _fits(height, width, dtype, memory, min_config)
    ]
    return max(fitting, default=HEIGHTS[1])


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory per program on a device, in bytes."""
    if device.type != "cuda":
        return 1 << 30  # any large number does in the interpreter
    # Triton itself compares a kernel's need with this number.
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def is_wide(width: int) -> bool:
    """Return whether a block of keys or values of a head is wide.

    Programs with few keys per block are then fastest, unless there are at most one or two programs
    per multiprocessor.

    Args:
        width: Width of the widest block of a head.
    """
    return width > 128


def has_few_tuning(width: int, dtype: torch.dtype) -> bool:
    """Return whether launches of few programs have a tuning of their own."""
    return width <= 256 and dtype.itemsize == 2


def _fits(height: int, width: int, dtype: torch.dtype, memory: int, chosen: dict[str, Any]) -> bool:
    """Return whether queries, blocks in flight and the weights of one block fit into shared memory.

    On Hopper and later, 16-bit products read keys and values from shared memory; otherwise only
    one of the two stays there.
    """
    block, size = chosen["BLOCK_N"], dtype.itemsize
    blocks = chosen["num_stages"] * block * width * (2 if size == 2 else 1)
    need = size * (height * width + blocks + height * block) + 4 * height
    return bool(need + 1024 <= memory)


def _fastest(height: int, width: int, dtype: torch.dtype, few: bool) -> dict[str, Any]:
    large = is_wide(width) or dtype == torch.float32
    few &= has_few_tuning(width, dtype)
    if height == HEIGHTS[0]:
        if few and not large:
            return {"BLOCK_N": 32, "num_warps": 2, "num_stages": 3}
        return {"BLOCK_N": 8, "num_warps": 1, "num_stages": 3}
    if height == HEIGHTS[1]:
        if few:
            warps, stages = (8, 2) if large else (4, 3)
            return {"BLOCK_N": 64, "num_warps": warps, "num_stages": stages}
        if large:
            return {"BLOCK_N": 32, "num_warps": 2, "num_stages": 2}
        # Fewer registers, so that more programs can wait for memory at the same time.
        return {"BLOCK_N": 16, "num_warps": 1, "num_stages": 3, "maxnreg": 168}
    if large:
        warps = 4 if height == HEIGHTS[2] and width <= 256 else 8
        return {"BLOCK_N": 32, "num_warps": warps, "num_stages": 2}
    if height == HEIGHTS[2]:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    if width <= 64:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
