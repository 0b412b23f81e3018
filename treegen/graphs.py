"""Decode steps as CUDA graphs: the GPU is handed a whole step at once.

A graph bakes in every size and address of the step it was captured from, so each is captured for
a number of rows (live rows are padded up to it), a page pool and capacities of the attention's
work list; what changes from step to step is copied into its input tensors. A step that fits no
graph runs eagerly once, on the inputs of the graph that is then captured for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treegen.attention.triton import StaticState, TritonState
from treegen.batch import Batch

_MAX_GRAPHS = 48


@dataclass(slots=True)
class _Graph:
    """A captured step: its inputs, its attention work list and its logits."""

    batch: Batch
    state: StaticState
    logits_SV: Tensor
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captures and replays decode steps of one model.

    off: why no graphs are used, None while they are.
    """

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """`forward` computes a batch eagerly."""
        self._forward = forward
        self._graphs: dict[tuple[int, int], list[_Graph]] = {}
        self._pool: Any = None  # memory that all graphs share, for only one runs at a time
        self.off: str | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(map(len, self._graphs.values()))

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V] of a decode batch; valid until the next step."""
        state = batch.levels.state
        if self.off is not None or not isinstance(state, TritonState):
            return self._forward(batch)
        num_rows = len(batch.tokens_T)
        key = padded_rows(num_rows), batch.layers[0].keys.data_ptr()
        for entry in self._graphs.get(key, []):
            if entry.state.load(state.levels):
                _fill(entry.batch, batch)
                entry.graph.replay()
                return entry.logits_SV[:num_rows]
        if self.num_graphs >= _MAX_GRAPHS:
            self._graphs.clear()
        return self._capture(batch, state, key)

    def _capture(self, batch: Batch, state: TritonState, key: tuple[int, int]) -> Tensor:
        static_state = StaticState(state.levels, state.device)
        static = _static_batch(batch, key[0], static_state)
        _fill(static, batch)
        logits_SV = self._forward(static)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                captured_SV = self._forward(static)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Models that ask the device for a number in the middle of a layer, as some mixtures
            # of experts do, cannot be captured.
            self.off = f"the step cannot be captured: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return logits_SV[: len(batch.tokens_T)]
        self._pool = graph.pool()
        entry = _Graph(static, static_state, captured_SV, graph)
        self._graphs.setdefault(key, []).insert(0, entry)
        return logits_SV[: len(batch.tokens_T)]


def padded_rows(num_rows: int) -> int:
    """Rows of the graph that a number of live rows runs in."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length() if num_rows > 1 else 1
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128 if num_rows <= 2048 else 256
    return -(-num_rows // step) * step


def _static_batch(batch: Batch, num_rows: int, state: StaticState) -> Batch:
    """Input tensors of a graph: rows past the live ones write to the padding page."""
    device = batch.tokens_T.device

    def zeros() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)

    positions_T = zeros()
    return Batch(
        tokens_T=zeros(),
        positions_T=positions_T,
        slots_T=zeros(),
        logits_at_S=torch.arange(num_rows, device=device),
        levels=replace(batch.levels, positions_T=positions_T, state=state, host=None, seen=set()),
        layers=batch.layers,
        decode=True,
    )


def _fill(static: Batch, batch: Batch) -> None:
    num_rows = len(batch.tokens_T)
    for name in ("tokens_T", "positions_T", "slots_T"):
        target: Tensor = getattr(static, name)
        target[:num_rows].copy_(getattr(batch, name))
        target[num_rows:].zero_()
