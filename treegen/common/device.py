"""Copies between host and device that block neither of them.

A copy from pageable memory to a GPU may first wait for all work queued on the GPU. A copy from
pinned memory is queued like a kernel, and the host continues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current inside, so that kernels and events go to the right GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast inside, so that types stay as written in the code."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on a device; on a CPU it may share the array's memory."""
    return pin_array(array, device).to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device, in one copy, because queueing copies takes time."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    pieces, stops = [np.zeros(8, np.uint8)], []  # because an empty tensor cannot be viewed
    stop = 8
    for array in arrays:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        padding = -len(raw) % 8  # so that every piece can be viewed as its own type
        pieces += [raw, np.zeros(padding, np.uint8)]
        stops.append((stop, stop + len(raw)))
        stop += len(raw) + padding
    buffer = to_device(np.concatenate(pieces), device)
    return [
        buffer[start:stop].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, (start, stop) in zip(arrays, stops, strict=True)
    ]


def pin_array(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a host tensor from which a copy to the device can be queued."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


class StagingBuffer:
    """A ring of pinned buffers through which the host fills tensors of a device.

    Pinning fresh memory for each copy would cost more than the copy.
    """

    def __init__(self, turns: int = 8) -> None:
        """Create a ring of empty buffers, which grow when they are used.

        Args:
            turns: Number of buffers, and so of copies after which one is reused. Default: 8.
        """
        self._pieces: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (torch.empty(0, dtype=torch.uint8), None) for _ in range(turns)
        ]
        self._turn = 0

    def send(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        write: Callable[[NDArray[Any]], None],
    ) -> Tensor:
        """Return a new tensor, filled as by `fill`; its copy overlaps the device's queued work.

        Args:
            shape: Shape of the tensor.
            dtype: Type of the tensor.
            device: Device of the tensor.
            write: Sets the values of a flat array of the tensor's type.
        """
        if device.type != "cuda":
            tensor = torch.empty(*shape, dtype=dtype, device=device)
            write(tensor.view(-1).numpy())
            return tensor
        main, copy_stream = torch.cuda.current_stream(device), _copy_stream(device)
        with torch.cuda.stream(copy_stream):
            tensor = torch.empty(*shape, dtype=dtype, device=device)
            self.fill(tensor, tensor.numel(), write)
        main.wait_stream(copy_stream)
        tensor.record_stream(main)  # keeps its memory from other copies until `main` has used it
        return tensor

    def fill(self, target: Tensor, num: int, write: Callable[[NDArray[Any]], None]) -> None:
        """Fill the first `num` numbers of a dense tensor, without waiting for the device.

        Args:
            target: The tensor.
            num: Number of values to fill.
            write: Sets the values of an array of `num` numbers of the tensor's type.
        """
        on_gpu = target.device.type == "cuda"
        num_bytes = num * target.itemsize
        self._turn = (self._turn + 1) % len(self._pieces)
        piece, event = self._pieces[self._turn]
        if event is not None:
            event.synchronize()  # usually returns at once, because that copy ended long ago
        if len(piece) < num_bytes:
            piece = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            event = torch.cuda.Event() if on_gpu else None
            self._pieces[self._turn] = piece, event
        part = piece[:num_bytes].view(target.dtype)
        write(part.numpy())
        target.view(-1)[:num].copy_(part, non_blocking=True)
        if event is not None:
            event.record()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for copies that overlap a device's work.

    torch reuses memory of a stream only for that stream. So if each run had its own stream, the
    memory of its copies would stay reserved after the run.
    """
    return torch.cuda.Stream(device)


class AsyncHostCopy:
    """Tensors that are being copied to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies after the device's queued work, one for each storage."""
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._copies = list(tensors)
            return
        self._copies = copy_together(tensors, _copy_to_host)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copies; return the tensors as arrays."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


def copy_together(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return copies of tensors; tensors that share a storage are copied with it in one call.

    Args:
        tensors: The tensors.
        copy: Returns a copy of a uint8 tensor, which is a whole storage.
    """
    storages: dict[int, Tensor] = {}
    copies = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage.data_ptr()] = copy(raw)
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            storages[storage.data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        copies.append(copied)
    return copies


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
