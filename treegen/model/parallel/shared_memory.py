"""Sums over ranks in GPU memory that all ranks have mapped, without NCCL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from treegen.common.lifetimes import use_environment_default
from treegen.ops.kernel_modules import import_kernels

SHARING_SIZES: Final = (2,)
"""Numbers of ranks whose tensors the kernels can add up."""
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read when ranks exchange their memory
_SYMMETRIC_MEMORY: Final = "torch.distributed._symmetric_memory"
_KERNELS: Final = "treegen.model.parallel.sum_kernels"
_NATIVE_ATOMICS: Final = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
# Numbers of 32 bits in the largest sum without flags, and in the largest launch with flags
_LINES: Final = 1 << 17
_STAGED: Final = 1 << 23
_MAX_PROGRAMS: Final = 256
_PIECES: Final = 16  # flags per program
# The buffer of this process, which is never freed; None if the only attempt to make one has failed.
_shared: list[SharedBuffer | None] = []


class SharedBuffer:
    """GPU memory in two ranks that both have mapped, for sums by the kernels of `sum_kernels`.

    torch's symmetric memory numbers the exchanges of a process, and later groups of rank 0 have new
    followers, which count from 0. So only one group of a process exchanges memory. The kernels wait
    for the other rank and cannot be aborted, so `release` ends them after a rank has died.
    """

    dtypes: Final = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        """Exchange memory of `allocate` with the other rank. A collective."""
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        with use_environment_default(_NO_MULTICAST, "1"):
            handle = import_module(_SYMMETRIC_MEMORY).rendezvous(memory, group)
        peer_memory = handle.get_buffer(1 - rank, memory.shape, memory.dtype)
        lines, staged, flags = _divide(memory)
        peer_lines, peer_staged, peer_flags = _divide(peer_memory)
        # Both ranks need the same number of programs, which must be able to run at the same time.
        processors = [
            torch.cuda.get_device_properties(index).multi_processor_count for index in range(size)
        ]
        num_programs = min(*processors, _MAX_PROGRAMS)
        zeros = partial(torch.zeros, dtype=torch.int32, device=memory.device)
        # In host memory, because waiting kernels may leave no room for a kernel that sets it.
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._tagged = lines, peer_lines, zeros(2 * num_programs), self._stop
        self._staged = staged, peer_staged, flags, peer_flags, zeros(num_programs), self._stop
        torch.cuda.synchronize(memory.device)  # before the other rank may write to it

    @staticmethod
    def allocate(device: torch.device) -> Tensor:
        """Return memory of a device for a buffer, all zero."""
        memory: Tensor = import_module(_SYMMETRIC_MEMORY).empty(
            sum(_AREAS), dtype=torch.uint8, device=device
        )
        return memory.zero_()

    def can_sum(self, tensor: Tensor) -> bool:
        """Return whether the kernels can add up a tensor."""
        offset = tensor.storage_offset() * tensor.itemsize
        is_aligned = tensor.nbytes % 4 == 0 and offset % 4 == 0
        return (
            tensor.dtype in self.dtypes
            and tensor.numel() > 0
            and is_aligned
            and tensor.is_contiguous()
        )

    def sum_into(self, out: Tensor, partial: Tensor, residual: Tensor | None = None) -> None:
        """Write residual + (the sum of `partial` over both ranks) to `out`. A collective.

        Both sums are rounded to the dtype.

        Args:
            out: A dense tensor like `partial`, which it may be.
            partial: A tensor that `can_sum` has accepted.
            residual: A dense tensor like `partial`, with the same numbers in both ranks; None for
                no residual.
        """
        kernels = import_module(_KERNELS)
        if partial.nbytes <= 4 * _LINES:
            kernels.sum_tagged(partial, residual, out, *self._tagged)
        else:
            kernels.sum_staged(partial, residual, out, *self._staged)

    def release(self) -> None:
        """End kernels that wait for a dead rank; later ones wait a few milliseconds at most.

        The results of all sums are then undefined.
        """
        self._stop.fill_(1)


_AREAS: Final = 2 * 8 * _LINES, 2 * 4 * _STAGED, 4 * _MAX_PROGRAMS * _PIECES  # bytes


def _divide(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's lines [2, N], staged numbers [2, M] and flags, as `sum_kernels` uses them."""
    lines, staged, flags = memory.split(_AREAS)
    return lines.view(torch.int64), staged.view(torch.int32), flags.view(torch.int32)


def share_memory(
    rank: int, size: int, device: torch.device, agree: Callable[[bool], bool]
) -> SharedBuffer | None:
    """Return memory that all ranks share, or None if a rank cannot share its own. A collective.

    Args:
        rank: The number of this rank.
        size: The number of ranks.
        device: The device of this rank.
        agree: Returns whether all ranks are able; see `Ranks.agree`.
    """
    if device.type != "cuda":
        return None
    own = device.index
    able = size in SHARING_SIZES and not _shared and import_kernels(_KERNELS) is not None
    able = able and all(_has_atomics(own, peer) for peer in range(size) if peer != own)
    if not agree(able):
        return None
    _shared.append(None)
    memory: Tensor | None = None
    with suppress(RuntimeError):  # such as a driver without virtual memory management
        memory = SharedBuffer.allocate(device)
    # Only then may the ranks exchange it, because each waits there for all others.
    if not agree(memory is not None):
        return None
    assert memory is not None
    with suppress(RuntimeError):  # such as a system that does not let processes share memory
        _shared[0] = SharedBuffer(memory, rank, size)
    return _shared[0] if agree(_shared[0] is not None) else None


def _has_atomics(device: int, peer: int) -> bool:
    """Whether a GPU has atomic operations on the memory of another one, as it has over NVLink.

    The kernels need them for their flags; over PCIe they might wait for ever.
    """
    supported = ctypes.c_int(0)
    if torch.cuda.can_device_access_peer(device, peer):
        with suppress(OSError):
            ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
                ctypes.byref(supported), _NATIVE_ATOMICS, device, peer
            )
    return bool(supported.value)
