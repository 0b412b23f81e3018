"""Capturing what a model computes as CUDA graphs, which share memory."""

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

_capturing = threading.Lock()  # a capture fails if another one waits for the whole GPU meanwhile
_T = TypeVar("_T")
_Entry = TypeVar("_Entry")


class GraphPool(Generic[_Entry]):
    """Graphs of one model and one kind, of which only one runs at a time: all use the same memory.

    off: why graphs are not used; None while they are.
    """

    _kind: str  # what is captured, in words

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """`forward` computes a batch eagerly."""
        self._forward = forward
        self._graphs: list[_Entry] = []
        self._pool: Any = None
        self._staging = StagingBuffer()
        self.off: str | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def can_capture(self, implementation: Implementation) -> bool:
        """Whether passes with this attention are captured."""
        return self.off is None and can_capture(implementation)

    def _drop_graphs(self) -> None:
        """Drop all graphs. Torch takes a pool that no graph uses for a fault."""
        self._graphs.clear()
        self._pool = None

    def _capture_graph(
        self, compute: Callable[[], _T], device: torch.device
    ) -> tuple[torch.cuda.CUDAGraph, _T] | None:
        """A graph of what `compute` does, and its output, which a replay fills.

        None if it cannot be captured; then there are no graphs any more. So it is if a model asks
        the device for a number in the middle of a layer, as some mixtures of experts do, or if no
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
            # If even the end of a capture fails, torch leaves its stream current, the pool open.
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
    """The stream on which graphs are captured on a GPU.

    Torch's own capture stream belongs to whichever GPU was the first to capture. All models of a
    GPU share this one, because cuBLAS keeps a workspace for every stream that it was ever used on.
    """
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class _CudaArray:
    """Memory of a GPU. Torch makes a tensor over it that does not own it."""

    __cuda_array_interface__: dict[str, Any]


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor that does not own its memory.

    So the pool of all graphs may use the memory again. Otherwise each graph would keep logits of
    its own, which may be a gigabyte. What reads them is queued before the next graph runs.
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
