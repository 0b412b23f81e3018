"""Captures computations of a model as CUDA graphs that share memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from treegen.common.device import StagingBuffer
from treegen.model.batch import Batch
from treegen.ops.attention.types import Implementation, can_capture

_capturing = threading.Lock()  # a capture fails if another thread synchronizes the GPU meanwhile
_T = TypeVar("_T")
_Entry = TypeVar("_Entry")


class GraphPool(Generic[_Entry]):
    """Graphs of one model and one kind. They share memory, so only one runs at a time.

    Attributes:
        off: Why graphs are not used; None while they are used.
    """

    _kind: str  # what is captured, for messages

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """Set up an empty pool; `forward` computes a batch eagerly."""
        self._forward = forward
        self._graphs: list[_Entry] = []
        self._pool: Any = None
        self._staging = StagingBuffer()
        self.off: str | None = None

    @property
    def num_graphs(self) -> int:
        """Number of graphs in the pool."""
        return len(self._graphs)

    def can_capture(self, implementation: Implementation) -> bool:
        """Return whether passes with this attention implementation are captured."""
        return self.off is None and can_capture(implementation)

    def _drop_graphs(self) -> None:
        """Drop all graphs and their pool; torch raises an error for a pool without graphs."""
        self._graphs.clear()
        self._pool = None

    def _capture_graph(
        self, compute: Callable[[], _T], device: torch.device
    ) -> tuple[torch.cuda.CUDAGraph, _T] | None:
        """Capture `compute` as a graph; return it with its output, which each replay overwrites.

        Return None if the capture fails; graphs are then turned off. It fails if a model reads a
        number from the device in the middle of a layer, as some mixtures of experts do, or if no
        memory is left for the capture.
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
        except RuntimeError as error:
            # If ending a capture fails too, torch leaves its stream current and the pool open.
            torch.cuda.set_stream(before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            self._drop_graphs()
            self.off = f"the {self._kind} cannot be captured: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return None
        return graph, out


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which graphs are captured on a GPU.

    Torch's own capture stream belongs to the GPU that captured first. All models of a GPU share
    this stream, because cuBLAS keeps a workspace for every stream on which it was ever used.
    """
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class _CudaArray:
    """GPU memory over which torch makes a tensor that does not own it."""

    __cuda_array_interface__: dict[str, Any]


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor that does not own its memory.

    So other graphs of the pool can reuse the memory. Otherwise each graph would keep its own
    logits, which may take a gigabyte. Kernels that read them are queued before the next graph runs.
    """
    raw = _CudaArray(
        {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
    )
    return torch.as_tensor(raw, device=tensor.device).view(tensor.dtype)
