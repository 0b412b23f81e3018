"""Small prefill passes as CUDA graphs: the host launches a whole pass at once.

With few tokens the GPU finishes a layer before the host has launched the next one. On an H200 a
pass of 64 tokens of an 8B model took 38 ms, of which the GPU worked 5 ms. Every search step that
adds given text has such a pass.

A graph is for one number of tokens and one number of logits; passes are padded up to them.
Capturing takes as long as two passes, so only sizes that occur repeatedly are captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import StagingBuffer, to_device_together
from treegen.engine.compute.cuda_graphs import MAX_CAPTURED_TOKENS, GraphPool, weak_ref_tensor
from treegen.model.batch import Batch
from treegen.ops.attention.gpu.state import StaticState, TritonState

_TOKEN_SIZES: Final = (16, 32, 64, 128, 192, 256, 384, 512, 768, MAX_CAPTURED_TOKENS)
_LOGIT_SIZES: Final = (16, 64, 128, 256, 512, 768, MAX_CAPTURED_TOKENS)
_MAX_GRAPHS: Final = 24
_MAX_PADDING: Final = 2  # maximum ratio of a graph's number of tokens to a pass's


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured pass."""

    batch: Batch
    """Its inputs, which are views of `memory`."""
    memory: Tensor
    """Tokens, positions, slots and indices of the tokens with logits, concatenated."""
    state: StaticState
    """Work list of its attention."""
    graph: torch.cuda.CUDAGraph
    """The CUDA graph."""
    out: Tensor
    """The logits."""


class PrefillGraphs(GraphPool[_Graph]):
    """Captures and replays prefill passes of one model."""

    _kind = "pass"

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """Set up an empty pool; `forward` computes a batch eagerly."""
        super().__init__(forward)
        # By size: number of passes without a fitting graph since the last capture, and of captures.
        self._missed: Counter[tuple[int, int]] = Counter()
        self._captured: Counter[tuple[int, int]] = Counter()

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Run a pass with inputs on the host; return logits [S, V], valid until the next pass."""
        state, size = batch.levels.state, _size_of(batch)
        if self.eager_because or size is None or batch.states or not isinstance(state, TritonState):
            return self._forward(_on_device(batch))
        entry = self._find(batch, state, size)
        if entry is not None:
            _fill(entry.memory, len(entry.batch.tokens_T), batch, self._staging)
            state.kernels = entry.state.kernels
            entry.graph.replay()
            return entry.out[: len(batch.logits_at_S)]
        self._missed[size] += 1
        # Passes of one size may still have different levels. So each capture of a size doubles the
        # misses that the next capture needs.
        if self._missed[size] < 2 << self._captured[size]:
            return self._forward(_on_device(batch))
        return self._capture(batch, state, size)

    def _find(self, batch: Batch, state: TritonState, size: tuple[int, int]) -> _Graph | None:
        """Return the smallest graph that fits a pass, with its levels copied in."""
        tokens, logits = size
        # With few tokens, reading the weights dominates.
        max_tokens = max(_MAX_PADDING * tokens, _TOKEN_SIZES[3])
        usable = [
            graph
            for graph in self._graphs
            if tokens <= len(graph.batch.tokens_T) <= max_tokens
            and logits <= len(graph.batch.logits_at_S)
            and graph.batch.layers[0].keys is batch.layers[0].keys
        ]
        usable.sort(key=lambda graph: (len(graph.batch.tokens_T), len(graph.batch.logits_at_S)))
        for entry in usable:
            if entry.state.load(state, self._staging):
                self._graphs.remove(entry)
                self._graphs.append(entry)  # it is now the last to be dropped
                return entry
        return None

    def _capture(self, batch: Batch, state: TritonState, size: tuple[int, int]) -> Tensor:
        """Compute a pass on the inputs of a new graph, and capture it for later passes."""
        self._missed[size] = 0
        self._captured[size] += 1
        if self.num_graphs >= _MAX_GRAPHS:
            del self._graphs[0]
        static_state = StaticState(state.levels, state.device, invariant=state.invariant)
        static, memory = _static(batch, size, static_state)
        _fill(memory, size[0], batch, self._staging)
        logits_SV = self._compute(static)[: len(batch.logits_at_S)]
        state.kernels = static_state.kernels
        captured = self._capture_graph(lambda: self._compute(static), state.device)
        if captured is None:
            return logits_SV
        graph, out = captured
        self._graphs.append(_Graph(static, memory, static_state, graph, weak_ref_tensor(out)))
        return logits_SV

    def _compute(self, static: Batch) -> Tensor:
        """Compute a pass as its graph does."""
        return self._forward(static).contiguous()


def _size_of(batch: Batch) -> tuple[int, int] | None:
    """Return the numbers of tokens and logits of a pass's graph; None if the pass is too large."""
    tokens, logits = (
        next((size for size in sizes if len(tensor) <= size), None)
        for sizes, tensor in ((_TOKEN_SIZES, batch.tokens_T), (_LOGIT_SIZES, batch.logits_at_S))
    )
    return None if tokens is None or logits is None else (tokens, logits)


def _inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.tokens_T, batch.positions_T, batch.slots_T, batch.logits_at_S


def _with_inputs(batch: Batch, inputs: Sequence[Tensor]) -> Batch:
    tokens_T, positions_T, slots_T, logits_at_S = inputs
    levels = replace(batch.levels, positions_T=positions_T)
    return replace(
        batch,
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        logits_at_S=logits_at_S,
        levels=levels,
    )


def _on_device(batch: Batch) -> Batch:
    arrays = [tensor.numpy() for tensor in _inputs(batch)]
    return _with_inputs(batch, to_device_together(arrays, batch.levels.device))


def _static(batch: Batch, size: tuple[int, int], state: StaticState) -> tuple[Batch, Tensor]:
    """Return a pass of a size on new input tensors for a graph, and their memory."""
    tokens, logits = size
    memory = torch.zeros(3 * tokens + logits, dtype=torch.int64, device=state.device)
    static = _with_inputs(batch, memory.split([tokens, tokens, tokens, logits]))
    levels = replace(static.levels, state=state, checked=False, seen=set())
    return replace(static, levels=levels), memory


def _fill(memory: Tensor, tokens: int, batch: Batch, staging: StagingBuffer) -> None:
    """Copy a pass's inputs into a graph's memory.

    Padding tokens write to the padding page, and their logits are not used.

    Args:
        memory: Memory of the graph's inputs.
        tokens: Number of tokens of the graph.
        batch: The pass, with inputs on the host.
        staging: Pinned memory for the copy.
    """
    inputs = [tensor.numpy() for tensor in _inputs(batch)]

    def write(flat: NDArray[np.int64]) -> None:
        flat[:] = 0
        for at, array in enumerate(inputs):
            flat[at * tokens : at * tokens + len(array)] = array

    staging.fill(memory, len(memory), write)
