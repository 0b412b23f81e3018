"""How a unit is computed: blocks, warps and pipeline stages that the card has memory for."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from triton.runtime import driver

from treegen.errors import InputError
from treegen.ops.attention.gpu.units import HEIGHTS

_ACCUMULATORS: Final = 128 << 10  # bytes of float32 results of a unit: half of the registers
_LEAST_KEYS: Final = 16  # of a block; a matrix product takes no fewer


def choose_tuning(height: int, width: int, dtype: torch.dtype, memory: int) -> dict[str, Any]:
    """Block of keys, warps and stages for a height and head width; see performance.md.

    Args:
        memory: Bytes that a program may share among its threads (`shared_memory`). What is fastest
            on an H200 shrinks until it fits; InputError if nothing does.
    """
    chosen = _fastest(height, width, dtype)
    while height > HEIGHTS[0] and not _fits(height, width, dtype, memory, chosen):
        if chosen["num_stages"] > 1:
            chosen["num_stages"] -= 1
        elif chosen["BLOCK_N"] > _LEAST_KEYS:
            chosen["BLOCK_N"] //= 2
        else:
            raise InputError(
                f"{height} query heads to a key head, {width} wide, need more shared "
                f"memory than this GPU's {memory:,} bytes; use impl='reference'"
            )
    return chosen


def latent_tuning(height: int, width: int, dtype: torch.dtype, memory: int) -> dict[str, Any]:
    """The same for latents, of which one block is keys and values; width: that of it."""
    if dtype == torch.float32 or width != 512:
        chosen = {"BLOCK_N": 16, "num_warps": 8 if height > HEIGHTS[1] else 4, "num_stages": 2}
    elif height < HEIGHTS[2]:
        # Two programs to a multiprocessor, each with two blocks on their way.
        chosen = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    else:
        # Results fill half of the registers, queries and two blocks all of the shared memory.
        chosen = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    size, rotated = dtype.itemsize, 64
    while True:
        block = chosen["BLOCK_N"]
        need = size * (height + chosen["num_stages"] * block) * (width + rotated)
        if need + 1024 <= memory or block == _LEAST_KEYS == chosen["num_stages"] * _LEAST_KEYS:
            return chosen
        if chosen["num_stages"] > 1:
            chosen["num_stages"] -= 1
        elif block > _LEAST_KEYS:
            chosen["BLOCK_N"] //= 2
        else:
            return chosen


def fold_tuning(height: int, width: int, dtype: torch.dtype, memory: int) -> dict[str, Any]:
    """The same for `fold_units`, which keeps more numbers in registers."""
    chosen = choose_tuning(height, width, dtype, memory)
    chosen.pop("maxnreg", None)
    if height >= HEIGHTS[2] and width <= 128 and dtype != torch.float32:
        warps = 8 if height == HEIGHTS[3] and width > 64 else 4
        chosen = {"BLOCK_N": 64, "num_warps": warps, "num_stages": 3}
        while not _fits(height, width, dtype, memory, chosen) and chosen["num_stages"] > 1:
            chosen["num_stages"] -= 1
    return chosen


@cache
def find_max_height(width: int, dtype: torch.dtype, memory: int) -> int:
    """The largest of HEIGHTS that can be computed at a head width."""
    least = {"BLOCK_N": _LEAST_KEYS, "num_stages": 1}
    fitting = [
        height
        for height in HEIGHTS[2:]
        if height * width * 4 <= _ACCUMULATORS and _fits(height, width, dtype, memory, least)
    ]
    return max(fitting, default=HEIGHTS[1])


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that the threads of one program may share on a device."""
    if device.type != "cuda":
        return 1 << 30  # in the interpreter, any number
    # What Triton itself compares a kernel's need with.
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def _fits(height: int, width: int, dtype: torch.dtype, memory: int, chosen: dict[str, Any]) -> bool:
    """Whether queries, the blocks under way and the weights of one block are few enough bytes.

    On Hopper and later, 16-bit products read keys and values from shared memory; elsewhere only
    one of them stays there.
    """
    block, size = chosen["BLOCK_N"], dtype.itemsize
    blocks = chosen["num_stages"] * block * width * (2 if size == 2 else 1)
    need = size * (height * width + blocks + height * block) + 4 * height
    return bool(need + 1024 <= memory)


def _fastest(height: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    large = width > 128 or dtype == torch.float32
    if height == HEIGHTS[0]:
        return {"BLOCK_N": 8, "num_warps": 1, "num_stages": 3}
    if height == HEIGHTS[1]:
        if large:
            return {"BLOCK_N": 32, "num_warps": 2, "num_stages": 2}
        # Fewer registers, so that more programs wait for memory at a time.
        return {"BLOCK_N": 16, "num_warps": 1, "num_stages": 3, "maxnreg": 168}
    if large:
        warps = 4 if height == HEIGHTS[2] and width <= 256 else 8
        return {"BLOCK_N": 32, "num_warps": warps, "num_stages": 2}
    if height == HEIGHTS[2]:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    if width <= 64:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
