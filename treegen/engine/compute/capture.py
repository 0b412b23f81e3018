"""Capturing what a model computes as CUDA graphs, which share memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

_capturing = threading.Lock()  # a capture fails if another one waits for the whole GPU meanwhile
_T = TypeVar("_T")


class Captures:
    """Graphs of one kind, of which only one runs at a time: all use the same memory."""

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self._pool: Any = None

    def forget(self) -> None:
        """All graphs are gone. Torch takes a pool that no graph uses for a fault."""
        self._pool = None

    def capture(
        self, compute: Callable[[], _T], device: torch.device
    ) -> tuple[torch.cuda.CUDAGraph, _T]:
        """A graph of what `compute` does, and its output, which a replay fills.

        Raises:
            RuntimeError: it cannot be captured. Nothing has changed.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing:
                torch.cuda.synchronize()
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=_stream(device),
                    capture_error_mode="thread_local",
                ):
                    out = compute()
        except RuntimeError:
            # If even the end of a capture fails, torch leaves its stream current, the pool open.
            torch.cuda.set_stream(before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        return graph, out


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which graphs are captured on a GPU.

    Torch's own capture stream belongs to whichever GPU was the first to capture. All models of a
    GPU share this one, because cuBLAS keeps a workspace for every stream that it was ever used on.
    """
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of a GPU. Torch makes a tensor over it that does not own it."""

    __cuda_array_interface__: dict[str, Any]


def borrowed(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor that does not own its memory.

    So the pool of all graphs may use the memory again. Otherwise each graph would keep logits of
    its own, which may be a gigabyte. What reads them is queued before the next graph runs.
    """
    raw = _Memory(
        {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
    )
    return torch.as_tensor(raw, device=tensor.device).view(tensor.dtype)
