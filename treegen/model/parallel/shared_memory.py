"""Sums over ranks in GPU memory that all ranks have mapped, without NCCL."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from math import inf
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from treegen.common.lifetimes import use_environment_default
from treegen.common.synchronization import run_in_daemon

_RELEASE_SECONDS: Final = 2.0  # seconds after a rank has died in which more sums may be launched
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read when ranks exchange their memory
_SYMMETRIC_MEMORY: Final = "torch.distributed._symmetric_memory"
_NATIVE_ATOMICS: Final = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_SHARED_BYTES: Final = 64 << 20
_ONE_SHOT_BYTES: Final = 512 << 10  # larger sums are faster if each rank adds up a part
_SHARING_SIZES: Final = (2,)  # numbers of ranks whose sums were tested in shared memory
# The buffer of this process, which is never freed; None if the only attempt to make one has failed.
_shared: list[SharedBuffer | None] = []


class SharedBuffer:
    """GPU memory in every rank that all ranks have mapped, for sums by torch's kernels.

    torch's symmetric memory numbers the exchanges of a process, and later groups of rank 0 have new
    followers, which count from 0. So only one group of a process exchanges memory. The kernels wait
    for signals of the other ranks and cannot be aborted, so `release` sends these signals after a
    rank has died.
    """

    dtypes: Final = (torch.bfloat16, torch.float32)

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        """Exchange memory of `allocate` with the other ranks. A collective."""
        self._group: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._bytes, device = memory, memory.device
        with use_environment_default(_NO_MULTICAST, "1"):
            handle = import_module(_SYMMETRIC_MEMORY).rendezvous(memory, self._group)
        pads = [handle.get_signal_pad(peer, dtype=torch.int32) for peer in range(size)]
        self._own_pad, self._peer_pads = pads.pop(rank), pads
        self._ones = torch.ones_like(self._own_pad)
        self._zeros = torch.zeros_like(self._own_pad)
        self._device, self._stream = device, torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    @staticmethod
    def allocate(device: torch.device) -> Tensor:
        """Return memory of a device for a buffer."""
        memory: Tensor = import_module(_SYMMETRIC_MEMORY).empty(
            _SHARED_BYTES, dtype=torch.uint8, device=device
        )
        return memory

    def view_like(self, tensor: Tensor) -> Tensor | None:
        """Return memory like a tensor, which the next sum overwrites; None if it does not fit."""
        nbytes = tensor.nbytes
        fits = 0 < nbytes <= _SHARED_BYTES and nbytes % 16 == 0 and tensor.is_contiguous()
        if not fits or tensor.dtype not in self.dtypes:
            return None
        return self._bytes[:nbytes].view(tensor.dtype).view(tensor.shape)

    def sum_into(self, view: Tensor, output: Tensor) -> None:
        """Write the sum of a view over all ranks to `output`. A collective."""
        if view.nbytes <= _ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(view, "sum", self._group, output)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(view, "sum", self._group, output)

    def release(self) -> None:
        """Let kernels end that wait for dead ranks, also those that are launched soon.

        The results of all sums are then undefined.
        """
        synchronize = partial(torch.cuda.synchronize, self._device)
        idle, deadline = run_in_daemon("treegen-synchronize", synchronize), inf
        with torch.cuda.stream(self._stream):
            while time.monotonic() < deadline:
                # A kernel waits until its pad has a one, and until the pad of a peer has a zero.
                for signal in (self._ones, self._zeros):
                    self._own_pad.copy_(signal)
                    for pad in self._peer_pads:
                        pad.copy_(self._zeros)
                self._stream.synchronize()
                if idle.done():
                    deadline = min(deadline, time.monotonic() + _RELEASE_SECONDS)


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
    able = size in _SHARING_SIZES and not _shared
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

    torch's kernels need them for their signals; over PCIe they might wait for ever.
    """
    supported = ctypes.c_int(0)
    if torch.cuda.can_device_access_peer(device, peer):
        with suppress(OSError):
            ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
                ctypes.byref(supported), _NATIVE_ATOMICS, device, peer
            )
    return bool(supported.value)
