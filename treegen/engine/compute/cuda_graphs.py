"""Captures computations of a model as CUDA graphs that share memory, and pads them to few sizes.

Batches are padded to a few sizes, so that few graphs are captured. Capturing a graph takes as long
as many steps. Until then a larger graph is replayed, whose additional rows are padding. A graph is
captured once padding has cost as much as a capture, so both together cost at most twice the optimum
(the ski rental problem). Both costs are estimated from the size of the model and never measured. So
equal runs of a new LLM capture the same graphs, and the rows of their products have the same bits.
A later run of the same LLM also has the graphs of earlier runs, and may use different ones.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from treegen.common.device import StagingBuffer
from treegen.common.formatting import summarize_error
from treegen.model.batch import Batch
from treegen.ops.attention.types import Implementation, can_capture

if TYPE_CHECKING:
    from treegen.model.model import Model


_capturing = threading.Lock()  # a capture fails if another thread synchronizes the GPU meanwhile
_T = TypeVar("_T")
_Entry = TypeVar("_Entry")


class GraphPool(Generic[_Entry]):
    """Graphs of one model and one kind of pass. They share memory, so only one runs at a time.

    Attributes:
        eager_because: Why passes are computed without graphs; None while graphs are used.
    """

    _kind: str  # what is captured, for messages

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """Set up an empty pool; `forward` computes a batch eagerly."""
        self._forward = forward
        self._graphs: list[_Entry] = []
        self._pool: Any = None
        self._staging = StagingBuffer()
        self.eager_because: str | None = None

    @property
    def num_graphs(self) -> int:
        """Number of graphs in the pool."""
        return len(self._graphs)

    def can_capture(self, implementation: Implementation) -> bool:
        """Return whether passes with this attention implementation are captured."""
        return self.eager_because is None and can_capture(implementation)

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
            self.eager_because = f"the {self._kind} cannot be captured: {summarize_error(error)}"
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


MAX_CAPTURED_TOKENS: Final = 1024
"""Maximum number of tokens of a prefill pass that may be captured."""
_QUERY_ROW_MULTIPLE: Final = 32  # query rows of verification steps are padded to multiples of this
CAPTURE_SECONDS: Final = 0.08
"""Time that the GPU idles during a capture."""
# Bytes of weights per second with which the GPU computes one more row of a large pass. A row takes
# two operations per weight, as many as a 16-bit weight has bytes. An 8-bit weight has half of the
# bytes, and its operations are twice as fast.
_WEIGHT_BYTES_PER_SECOND: Final = 650e12


def pad_num_rows(num_rows: int) -> int:
    """Return the number of rows of the graph that decodes `num_rows` live rows."""
    if num_rows <= 16:
        # Never 1, for which the compiler would make separate kernels at the end of a run.
        return 1 << max(num_rows - 1, 1).bit_length()
    # With many rows, matrix products compute 128 or more rows at a time.
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def pad_num_query_rows(num_rows: int) -> int:
    """Return the number of query rows of the graph that verifies draft tokens.

    Args:
        num_rows: Number of query rows of the step, which differs from step to step.
    """
    return -(-num_rows // _QUERY_ROW_MULTIPLE) * _QUERY_ROW_MULTIPLE


def estimate_row_seconds(model: Model) -> float:
    """Estimate the seconds of one row in a pass of many; only a token's active experts count."""
    config = model.module.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    num_bytes: float = sum(
        weight.nbytes * (min(experts / len(weight), 1.0) if weight.dim() == 3 else 1.0)
        for weight in model.module.parameters()
    )
    return num_bytes / _WEIGHT_BYTES_PER_SECOND
