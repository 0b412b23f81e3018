"""Decode steps as CUDA graphs: the GPU is handed a whole step at once.

A graph bakes in every size and address of the step it was captured from, so each is captured for
a number of rows (live rows are padded up to it), a page pool, the trunk that the dense kernel reads
and capacities of the attention's work list; what changes from step to step is copied into its
input tensors. A step that fits no graph runs eagerly once, on the inputs of the graph that is then
captured for the next ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treegen.attention.triton_state import StaticState, TritonState
from treegen.batch import Batch

_MAX_GRAPHS = 48
_PATIENCE = 8.0  # steps' worth of padding in larger graphs before one of the size is captured


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured step: its inputs, its attention work list and its logits.

    inputs_3T: the tokens, positions and slots of the batch.
    """

    batch: Batch
    inputs_3T: Tensor
    state: StaticState
    logits_SV: Tensor
    graph: torch.cuda.CUDAGraph

    @property
    def num_rows(self) -> int:
        """Rows that it computes."""
        return len(self.batch.tokens_T)


class DecodeGraphs:
    """Captures and replays decode steps of one model.

    off: why no graphs are used, None while they are.
    """

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """`forward` computes a batch eagerly."""
        self._forward = forward
        self._graphs: list[_Graph] = []
        self._padding: defaultdict[int, float] = defaultdict(float)  # by size, in steps
        self._pool: Any = None  # memory that all graphs share, for only one runs at a time
        self.off: str | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V] of a decode batch; valid until the next step."""
        state = batch.levels.state
        if self.off is not None or not isinstance(state, TritonState):
            return self._forward(batch)
        num_rows = len(batch.tokens_T)
        entry = self._find(batch, state)
        if entry is None:
            return self._capture(batch, state)
        _fill(entry.inputs_3T, batch)
        state.kernels = entry.state.kernels
        entry.graph.replay()
        return entry.logits_SV[:num_rows]

    def _find(self, batch: Batch, state: TritonState) -> _Graph | None:
        """A graph with the batch's levels in place: of its size, or for a while a larger one.

        Capturing takes as long as many steps, and while a run ends sizes are soon left behind.
        """
        keys, size = batch.layers[0].keys, padded_rows(len(batch.tokens_T))
        most = size if self._padding[size] > _PATIENCE else 4 * size
        usable = [
            each
            for each in self._graphs
            if size <= each.num_rows <= most and each.batch.layers[0].keys is keys
        ]
        usable.sort(key=lambda each: each.num_rows)
        for entry in usable:
            if entry.state.load(state):
                self._padding[size] += 1 - size / entry.num_rows
                self._graphs.remove(entry)
                self._graphs.append(entry)  # the last to be dropped
                return entry
        return None

    def _capture(self, batch: Batch, state: TritonState) -> Tensor:
        size = padded_rows(len(batch.tokens_T))
        self._padding[size] = 0.0
        if self.num_graphs >= _MAX_GRAPHS:
            del self._graphs[0]
        static_state = StaticState(state.levels, state.device)
        inputs_3T = torch.zeros(3, size, dtype=torch.int64, device=batch.tokens_T.device)
        static = _static_batch(batch, inputs_3T, static_state)
        _fill(inputs_3T, batch)
        logits_SV = self._forward(static)
        state.kernels = static_state.kernels
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                captured_SV = self._forward(static).contiguous()
        except RuntimeError as error:
            # Models that ask the device for a number in the middle of a layer, as some mixtures
            # of experts do, cannot be captured; or no memory is left for it.
            self._graphs.clear()
            self._pool = None
            self.off = f"the step cannot be captured: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return logits_SV[: len(batch.tokens_T)]
        self._pool = graph.pool()
        entry = _Graph(static, inputs_3T, static_state, _borrowed(captured_SV), graph)
        self._graphs.append(entry)
        return logits_SV[: len(batch.tokens_T)]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of a GPU, for torch to make a tensor over it that does not own it."""

    __cuda_array_interface__: dict[str, Any]


def _borrowed(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous, whose memory the pool of all graphs may use again.

    Otherwise each graph would keep logits of its own, which may be a gigabyte. Whoever reads them
    is queued before the next graph runs.
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


def padded_rows(num_rows: int) -> int:
    """Rows of the graph that a number of live rows runs in."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length() if num_rows > 1 else 1
    # Matrix products take 128 rows or more at a time, wherever they are many.
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def _static_batch(batch: Batch, inputs_3T: Tensor, state: StaticState) -> Batch:
    """A batch on a graph's inputs: rows past the live ones write to the padding page."""
    tokens_T, positions_T, slots_T = inputs_3T
    return Batch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        logits_at_S=torch.arange(len(tokens_T), device=tokens_T.device),
        levels=replace(batch.levels, positions_T=positions_T, state=state, host=None, seen=set()),
        layers=batch.layers,
        decode=True,
    )


def _fill(inputs_3T: Tensor, batch: Batch) -> None:
    num_rows = len(batch.tokens_T)
    inputs_3T[:, :num_rows] = torch.stack([batch.tokens_T, batch.positions_T, batch.slots_T])
    inputs_3T[:, num_rows:] = 0
