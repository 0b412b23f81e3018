"""Decode steps as CUDA graphs: the host launches a whole step, from token to token, at once.

A graph fixes every size and address of the step from which it was captured. So each graph is for
one number of rows (live rows are padded up to it), one page pool, one trunk that the dense kernel
reads, and fixed capacities of the attention's work list. Inputs that change from step to step are
copied into the graph's input tensors.

A step that fits no graph runs eagerly once, on the inputs of a new graph, which is then captured
for later steps. Only plain draws are part of a graph. Draws that filter tokens or report
alternatives take much memory, which each graph would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.engine.compute.cuda_graphs import (
    CAPTURE_SECONDS,
    GraphPool,
    pad_num_query_rows,
    pad_num_rows,
    weak_ref_tensor,
)
from treegen.engine.compute.decode_step import NUM_INPUTS, POSITION, DecodeStep, DeferredDraws
from treegen.model.batch import Batch
from treegen.model.recurrent.state_batch import states_in_slots
from treegen.ops.attention.gpu.state import StaticState, TritonState, live_rows_of
from treegen.ops.recurrence import RowSlots
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import Draws

_MAX_GRAPHS = 48
_MIN_DRAWN_ROWS = 4096  # initial number of rows in the tensor of drawn tokens


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured step: its inputs, its attention work list and its output."""

    step: DecodeStep
    """The step whose tensors are the graph's inputs."""
    state: StaticState
    """Work list of its attention."""
    copies: StaticState | None
    """Work list of its attention to expanded copies; None if it reads none."""
    graph: torch.cuda.CUDAGraph
    """The CUDA graph."""
    out: Draws | Tensor
    """The draws, or logits [T, V] if draws are made outside the graph."""
    filled: int
    """Number of rows whose inputs are set; the inputs of further rows are 0."""
    sampling: SamplingBatch
    """The sampling parameters copied last."""
    size: int
    """Number of rows."""
    is_verification: bool
    """Whether the step verifies draft tokens, so that items have several query rows each."""


class DecodeGraphs(GraphPool[_Graph]):
    """Captures and replays decode steps of one model.

    Attributes:
        num_captured: Steps that were captured, or could not be.
    """

    _kind = "step"

    def __init__(self, forward: Callable[[Batch], Tensor], row_seconds: float) -> None:
        """Set up an empty pool.

        Args:
            forward: Computes a batch eagerly.
            row_seconds: Seconds that one row takes in a pass of many.
        """
        super().__init__(forward)
        self._row_seconds = row_seconds
        self._padding_seconds = 0.0  # time that padding has cost since the last capture
        # `_drawn_P1` has the tokens of the last step at the address that graphs read.
        # `_last_draws_P1` is the tensor of these tokens that the caller passes to the next step.
        self._drawn_P1 = self._last_draws_P1 = torch.empty(0, 1, dtype=torch.int64)
        self.num_captured = 0

    @torch.inference_mode()
    def run(self, step: DecodeStep) -> Draws | DeferredDraws:
        """Run a step; return its draws, which are valid until the next step.

        The inputs of a step that may be captured must be on the host.
        """
        state = step.levels.state
        if self.eager_because is not None or not isinstance(state, TritonState):
            return step.on_device().compute(self._forward)
        self._copy_last_tokens(step, state.device)
        entry = self._find(step, state)
        if entry is None:
            return self._capture(step.on_device(), state)
        self._fill(entry, step)
        _name_kernels(step, entry.state, entry.copies)
        entry.graph.replay()
        return self._slice_draws(entry.out, step, entry.step)

    def _copy_last_tokens(self, step: DecodeStep, device: torch.device) -> None:
        """Copy the last step's tokens to where graphs read them, unless a graph has done so."""
        drawn_P1 = step.drawn_P1
        padded = max(pad_num_rows(step.num_rows), pad_num_query_rows(step.num_rows))
        rows = max(padded, 0 if drawn_P1 is None else len(drawn_P1))
        if rows > len(self._drawn_P1):
            self._drop_graphs()
            self._drawn_P1 = torch.zeros(
                max(2 * rows, _MIN_DRAWN_ROWS), 1, dtype=torch.int64, device=device
            )
            self._last_draws_P1 = self._drawn_P1
        if drawn_P1 is not None and drawn_P1 is not self._last_draws_P1:
            self._drawn_P1[: len(drawn_P1)] = drawn_P1

    def _find(self, step: DecodeStep, state: TritonState) -> _Graph | None:
        """Return the smallest graph with room for a step's rows, with its levels copied in.

        Return None if capturing a graph of the step's size costs less than further padding.
        """
        size, is_verification = _padded_size(step, state), _is_verification(state)
        usable = [
            graph
            for graph in self._graphs
            if size <= graph.size
            and graph.is_verification == is_verification
            and (graph.copies is None) == (step.levels.copies is None)
            and graph.step.cache is step.cache
            and graph.step.sampling.is_plain == step.sampling.is_plain
        ]
        usable.sort(key=lambda graph: graph.size)
        for entry in usable:
            padding_seconds = self._padding_seconds + (entry.size - size) * self._row_seconds
            # All ranks must compute the same number of rows, whichever graphs each of them has.
            must_fit = step.ranks is not None or padding_seconds > CAPTURE_SECONDS
            if must_fit and entry.size > size:
                return None
            if self._load_levels(entry, step, state):
                self._padding_seconds = padding_seconds
                self._graphs.remove(entry)
                self._graphs.append(entry)  # it is now the last to be dropped
                return entry
        return None

    def _load_levels(self, entry: _Graph, step: DecodeStep, state: TritonState) -> bool:
        """Copy a step's levels into a graph; return False if they do not fit."""
        copies = step.levels.copies
        if copies is not None:
            assert entry.copies is not None
            if not entry.copies.load(copies.state, self._staging, live_rows_of(state.levels)):
                return False
        return entry.state.load(state, self._staging)

    def _capture(self, step: DecodeStep, state: TritonState) -> Draws | DeferredDraws:
        size = _padded_size(step, state)
        self._padding_seconds = 0.0
        self.num_captured += 1
        if self.num_graphs >= _MAX_GRAPHS:
            del self._graphs[0]
        static_state = StaticState(state.levels, state.device, invariant=state.invariant)
        copies: StaticState | None = None
        if step.levels.copies is not None:
            copies = StaticState(step.levels.copies.state.levels, state.device)
            copies.live_rows = live_rows_of(state.levels)
        static = _static_step(step, size, static_state, copies, self._drawn_P1)
        draws = self._slice_draws(self._compute(static), step, static)
        _name_kernels(step, static_state, copies)
        captured = self._capture_graph(lambda: self._compute(static), state.device)
        if captured is None:
            return draws
        graph, out = captured
        if step.ranks is not None:
            step.ranks.graphs.add(graph)
        if isinstance(out, Tensor):
            out = weak_ref_tensor(out)
        is_verification = _is_verification(state)
        self._graphs.append(
            _Graph(
                static,
                static_state,
                copies,
                graph,
                out,
                step.num_rows,
                step.sampling,
                size,
                is_verification,
            )
        )
        return draws

    def _compute(self, static: DecodeStep) -> Draws | Tensor:
        """Compute a step as its graph does."""
        logits_TV = static.logits(self._forward)
        if not static.sampling.is_plain:
            return logits_TV.contiguous()
        draws = static.draw_now(logits_TV)
        self._drawn_P1[: static.num_rows] = draws.tokens_PN
        return draws

    def _slice_draws(
        self, out: Draws | Tensor, step: DecodeStep, static: DecodeStep
    ) -> Draws | DeferredDraws:
        """Return the draws of a step's own rows, without those of padding.

        Args:
            out: Output of the graph.
            step: The step.
            static: The step of the graph, whose tensors are its inputs.
        """
        if isinstance(out, Tensor):
            inputs_8T = static.inputs_8T[:, : step.num_rows]
            return replace(step, inputs_8T=inputs_8T).draw(out[: step.num_rows])
        draws = out.first(step.num_rows)
        self._last_draws_P1 = draws.tokens_PN
        return draws

    def _fill(self, entry: _Graph, step: DecodeStep) -> None:
        """Copy a step's inputs into a graph, in place of those of the last step."""
        num_rows, static = step.num_rows, entry.step
        inputs_8T = step.inputs_8T.numpy()

        def write(flat: NDArray[np.int64]) -> None:
            target_8T = flat.reshape(NUM_INPUTS, -1)
            target_8T[:, :num_rows] = inputs_8T
            target_8T[:, num_rows:] = 0

        self._staging.fill(static.inputs_8T, static.inputs_8T.numel(), write)
        if step.states is not None and step.states.rows is not None:
            assert static.states is not None and static.states.rows is not None
            target_RT = static.states.rows.inputs_RT
            target_RT[:, :num_rows] = step.states.rows.inputs_RT
            target_RT[:, num_rows : max(num_rows, entry.filled)] = 0
        entry.filled = num_rows
        if entry.sampling is not step.sampling:
            if step.sampling.is_plain:
                static.sampling.load(step.sampling)
            entry.sampling = step.sampling


def _is_verification(state: TritonState) -> bool:
    """Return whether items have several query rows each, which see the items' keys causally."""
    return any(level.causal for level in state.levels)


def _padded_size(step: DecodeStep, state: TritonState) -> int:
    """Return the number of rows of the graph of a step."""
    if not _is_verification(state):
        return pad_num_rows(step.num_rows)
    return pad_num_query_rows(step.num_rows)


def _name_kernels(step: DecodeStep, state: StaticState, copies: StaticState | None) -> None:
    """Set the names of the kernels that compute a step's levels."""
    step.levels.state.kernels = state.kernels
    if step.levels.copies is not None and copies is not None:
        step.levels.copies.state.kernels = copies.kernels


def _static_step(
    step: DecodeStep, size: int, state: StaticState, copies: StaticState | None, drawn_P1: Tensor
) -> DecodeStep:
    """Return a step of `size` rows on new input tensors for a graph, filled from another step.

    Padding rows write to the padding page, and their draws are not used.

    Args:
        step: The step from which the inputs are copied.
        size: Number of rows of the graph.
        state: Work list of its attention.
        copies: Work list of its attention to expanded copies; None if it reads none.
        drawn_P1: Tensor from which the graph reads the tokens of the previous step.
    """
    inputs_8T = step.inputs_8T.new_zeros(NUM_INPUTS, size)
    inputs_8T[:, : step.num_rows] = step.inputs_8T
    sampling = step.sampling
    if sampling.is_plain:
        sampling = SamplingBatch.greedy(size, inputs_8T.device)
        sampling.load(step.sampling)
    levels = replace(
        step.levels.with_positions(inputs_8T[POSITION]), state=state, checked=False, seen=set()
    )
    if levels.copies is not None:
        levels = replace(levels, copies=replace(levels.copies, state=copies, seen=set()))
    states = None
    if step.states is not None:
        # Padding rows use the slot of no state, whose content does not matter.
        assert step.states.rows is not None
        live_RT = step.states.rows.inputs_RT
        inputs_RT = live_RT.new_zeros(len(live_RT), size)
        inputs_RT[:, : step.num_rows] = live_RT
        states = states_in_slots(RowSlots(inputs_RT), step.states.layers)
    static = DecodeStep(inputs_8T, drawn_P1, levels, sampling, step.cache, states)
    return replace(static, ranks=step.ranks, vocab_size=step.vocab_size)
