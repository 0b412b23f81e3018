"""The recurrent states that a pass reads and writes, and its tokens by sequence.

Other layers take the tokens of a pass as one row. A recurrent layer takes a batch of sequences,
each from its own state. So the pass is cut into pieces (consecutive tokens of one sequence), and
pieces of equal length run together. A piece that starts from the final state of another piece of
the pass runs in a later stage. treegen's operators compute the runs of a pass on windows and states
in their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from treegen.common.device import to_device, to_device_together
from treegen.common.lifetimes import use_context_value
from treegen.common.spec import DeltaSpec, StateSpec
from treegen.ops.cache.state_cache import NO_STATE, StateCache
from treegen.ops.recurrence import (
    Convolution,
    DeltaInputs,
    DeltaStates,
    RowSlots,
    fold_update_lists,
    scan,
    step,
)

# T tokens of a pass, C channels, W width of windows, N sequences that run together, L tokens of
# each, H heads, V value dimension

_MAX_TOKENS: Final = 2**14  # maximum tokens that run together; fewer for short pieces
_SHORT: Final = 64  # tokens that a piece is padded to in layers that compute chunks
_MAX_BYTES: Final = 2**28  # maximum bytes of one layer's states that run together


class Piece(NamedTuple):
    """Consecutive tokens of one sequence."""

    start: int
    """The row of its first token in the pass."""
    num: int
    """Its number of tokens."""
    read_slot: int
    """The slot of the state before it; NO_STATE at the start of a text."""
    write_slot: int
    """The slot of the state after it."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Pieces of equal length that run together."""

    num: int
    """N, the number of pieces."""
    length: int
    """L, the tokens of each."""
    rows: slice | Tensor
    """The rows of their N * L tokens in the pass."""
    read_slots_N: Tensor | None
    """int64, slots of the states before; None at the start of texts."""
    write_slots_N: Tensor
    """int64, slots of the states after."""

    @property
    def one_token(self) -> RowSlots | None:
        """The slots of sequences that continue by one token each; None for any other run."""
        if self.length > 1 or self.read_slots_N is None:
            return None
        return RowSlots(torch.stack([self.read_slots_N, self.write_slots_N]))

    @property
    def sequences(self) -> tuple[Tensor, Tensor, int]:
        """The slots before, -1 at the start of texts, the slots after, and the tokens of each."""
        read_slots_N = self.read_slots_N
        if read_slots_N is None:
            read_slots_N = torch.full_like(self.write_slots_N, -1)
        return read_slots_N, self.write_slots_N, self.length


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The recurrent states that a pass reads and writes."""

    runs: Sequence[StateRun]
    """Its runs, in order; empty if the rows of a decode step have update lists."""
    layers: Sequence[Sequence[Tensor]]
    """The state tensors of each recurrent layer."""
    rows: RowSlots | None = None
    """The state slots of a decode step's rows; None for other passes."""
    in_order: bool = False
    """Whether a token's sums have the same order in every pass. Rows then have no update lists."""

    def with_rows(self, padding: int) -> StateBatch:
        """Return this pass in order, with `padding` more rows that write to the spare slot."""
        rows = self.rows
        if rows is not None and padding:
            read_slots_T, write_slots_T = rows.inputs_RT
            ends = (
                pad(read_slots_T, (0, padding), value=-1),
                pad(write_slots_T, (0, padding), value=NO_STATE),
            )
            rows = RowSlots(torch.stack(ends))
        return replace(self, rows=rows, in_order=True)

    def in_sequences(self, out: Tensor, compute: Callable[[StateRun], Tensor]) -> Tensor:
        """Fill out [T, ...] with results for the sequences of a pass, and with zeros elsewhere.

        Args:
            out: The outputs; overwritten, unless all rows are computed at once.
            compute: Returns the outputs of a run.

        Returns:
            The outputs [T, ...].
        """
        if self.rows is not None:
            return compute(StateRun(self.rows.num_rows, 1, slice(None), *self.rows.inputs_RT))
        out.zero_()  # for spare rows
        for run in self.runs:
            out[run.rows] = compute(run)
        return out


_current: ContextVar[StateBatch] = ContextVar("treegen_states")


def use_slots(batch: StateBatch) -> AbstractContextManager[None]:
    """While open, layers with an operator of treegen's run on the states of this pass."""
    return use_context_value(_current, batch)


def states_of_pass() -> StateBatch:
    """Return the `StateBatch` of the pass that is running."""
    return _current.get()


def states_of_pieces(pieces: Sequence[Piece], layers: Sequence[Sequence[Tensor]]) -> StateBatch:
    """Return the states that a pass reads and writes; each of its tokens belongs to one piece."""
    groups: dict[tuple[int, int, bool], list[Piece]] = {}
    for piece, stage in zip(pieces, _stages(pieces), strict=True):
        groups.setdefault((stage, piece.num, piece.read_slot == NO_STATE), []).append(piece)
    device = layers[0][0].device
    runs: list[StateRun] = []
    for (_, length, is_first), group in sorted(groups.items(), key=lambda item: item[0][0]):
        max_pieces = _max_together(length, layers)
        parts = (group[at : at + max_pieces] for at in range(0, len(group), max_pieces))
        runs += [_run(part, length, is_first, device) for part in parts]
    return StateBatch(runs, layers)


def states_of_rows(inputs: NDArray[np.int64], layers: Sequence[Sequence[Tensor]]) -> StateBatch:
    """Return the states that a decode step reads and writes, with one token per row.

    Args:
        inputs: The slots that rows read and write [2, T], or rows with lists [4 + P, T] as in
            `RowSlots`.
        layers: The state tensors of each recurrent layer.
    """
    return states_in_slots(RowSlots(to_device(inputs, layers[0][0].device)), layers)


def states_in_slots(rows: RowSlots, layers: Sequence[Sequence[Tensor]]) -> StateBatch:
    """Return the states of a decode step from slots on the device; the runs are views of these."""
    runs: list[StateRun] = []
    if not rows.has_lists:
        max_pieces, (read_slots_N, write_slots_N) = _max_together(1, layers), rows.inputs_RT
        for at in range(0, rows.num_rows, max_pieces):
            part = slice(at, min(at + max_pieces, rows.num_rows))
            runs.append(StateRun(part.stop - at, 1, part, read_slots_N[part], write_slots_N[part]))
    return StateBatch(runs, layers, rows)


@torch.inference_mode()
def fold_lists(cache: StateCache, folds: Sequence[NDArray[np.int64]]) -> None:
    """Fold update lists into new states in all layers.

    Args:
        cache: The states.
        folds: Arrays [3 + P, F] for F lists each: the slots of the states that the lists start
            from, the slots of the new states, the numbers of updates, and the P pages of the lists.
    """
    for fold in folds:
        assert cache.delta is not None
        lists = to_device(fold, cache.layers[0][0].device)
        for windows, states in cache.layers:
            fold_update_lists(
                DeltaStates(windows, states, cache.delta), lists[0], lists[1], lists[2], lists[3:]
            )


def state_bytes_together(layers: Sequence[int], num: int) -> int:
    """Estimate the bytes that a step of `num` rows takes in addition to its states.

    The states that run together are gathered, and several float32 copies are computed from them.

    Args:
        layers: Bytes of one row's states in each layer.
        num: The number of rows.
    """
    return 8 * max((min(num * size, max(_MAX_BYTES, size)) for size in layers), default=0)


def _max_together(length: int, layers: Sequence[Sequence[Tensor]]) -> int:
    largest = max(sum(tensor[0].nbytes for tensor in tensors) for tensors in layers)
    by_tokens = _MAX_TOKENS // max(length, _SHORT) if length > 1 else _MAX_TOKENS
    return max(min(by_tokens, _MAX_BYTES // max(largest, 1)), 1)


def _stages(pieces: Sequence[Piece]) -> list[int]:
    """Return for each piece how many pieces of the pass must be computed before it, in sequence."""
    writers = {piece.write_slot: index for index, piece in enumerate(pieces)}
    stages: dict[int, int] = {}
    for first in range(len(pieces)):
        path = [first]
        while path[-1] not in stages:
            read_slot = pieces[path[-1]].read_slot
            above = writers.get(read_slot, path[-1]) if read_slot != NO_STATE else path[-1]
            if above == path[-1]:  # its state exists already, maybe in the slot it writes
                stages[above] = 0
            else:
                assert above not in path, "pieces read each other's states"
                path.append(above)
        for above, below in zip(path[:0:-1], path[-2::-1], strict=True):
            stages[below] = stages[above] + 1
    return [stages[index] for index in range(len(pieces))]


def _run(group: Sequence[Piece], length: int, is_first: bool, device: torch.device) -> StateRun:
    starts = np.array([piece.start for piece in group])
    read_slots = np.array([piece.read_slot for piece in group], dtype=np.int64)
    write_slots = np.array([piece.write_slot for piece in group], dtype=np.int64)
    rows = (starts[:, None] + np.arange(length)).reshape(-1).astype(np.int64)
    read_slots_N, write_slots_N, rows_NL = to_device_together(
        [read_slots, write_slots, rows], device
    )
    first = int(rows[0])
    consecutive = np.array_equal(rows, np.arange(first, first + len(rows)))
    return StateRun(
        num=len(group),
        length=length,
        rows=slice(first, first + len(rows)) if consecutive else rows_NL,
        read_slots_N=None if is_first else read_slots_N,
        write_slots_N=write_slots_N,
    )


Rule = Callable[[DeltaInputs, DeltaSpec, Tensor, Tensor | None, StateRun], tuple[Tensor, Tensor]]
"""Computes the outputs of N sequences, [N, L, H, V], and their new states, many tokens at once.

Its arguments are the layer's inputs and sizes, the convolution's outputs [N, L, C], the states
before (None at the start of texts), and the run.
"""


def has_state_shapes(
    states: Sequence[StateSpec],
    dtype: torch.dtype,
    window: tuple[int, ...],
    state: tuple[int, ...] | None = None,
) -> bool:
    """Return whether a layer keeps exactly a window and a state of these shapes.

    Args:
        states: The states that the layer keeps.
        dtype: The type of the window; the state must be float32.
        window: The shape of the convolution window.
        state: The shape of the recurrent state; None for none.
    """
    expected = [("conv", window, str(dtype).removeprefix("torch."))]
    if state is not None:
        expected.append(("recurrent", state, "float32"))
    return [
        (state_spec.kind, state_spec.shape, state_spec.dtype) for state_spec in states
    ] == expected


def delta_pass(inputs: DeltaInputs, cache: DeltaStates, rule: Rule) -> Tensor:
    """Return the recurrence's output at each token of this pass, [T, H, V], and update its states.

    Args:
        inputs: The inputs of the layer.
        cache: Its windows and states in their slots.
        rule: Computes runs of several tokens.
    """
    batch = states_of_pass()
    out_THV = inputs.mixed_TC.new_empty(len(inputs.mixed_TC), cache.spec.v_heads, cache.spec.v_dim)
    if batch.in_order:
        return batch.in_sequences(
            out_THV, lambda run: scan(inputs.rows(run.rows), cache, *run.sequences)
        )
    if batch.rows is not None:
        return step(inputs, cache, batch.rows).contiguous()
    for run in batch.runs:
        rows = inputs.rows(run.rows)
        if (slots := run.one_token) is not None:
            out_THV[run.rows] = step(rows, cache, slots)
            continue
        out = convolve_run(rows.mixed_TC, inputs.convolution(cache), run)
        state = None if run.read_slots_N is None else cache.states[run.read_slots_N]
        out_NLHV, last = rule(rows, cache.spec, silu(out), state, run)
        cache.states[run.write_slots_N] = last.to(cache.states.dtype)
        out_THV[run.rows] = out_NLHV.flatten(0, 1)
    return out_THV


def convolve_run(x_TC: Tensor, conv: Convolution, run: StateRun) -> Tensor:
    """Return the convolution's outputs for a run's tokens, [N, L, C], and update the windows.

    Args:
        x_TC: The inputs of these N * L tokens.
        conv: The convolution.
        run: The run.
    """
    weights_CW, bias_C, windows = conv
    x_NCL = x_TC.view(run.num, run.length, -1).transpose(1, 2)
    width, kernel_size = windows.shape[-1], weights_CW.shape[-1]
    if run.read_slots_N is None:
        before = x_NCL.new_zeros(run.num, x_NCL.shape[1], width)
    else:
        before = windows[run.read_slots_N]
    extended = torch.cat([before, x_NCL], -1)
    windows[run.write_slots_N] = extended[..., -width:]
    extended = extended[..., width - kernel_size + 1 :].to(weights_CW.dtype)
    out_NCL = conv1d(extended, weights_CW[:, None], bias_C, groups=len(weights_CW))
    return out_NCL.transpose(1, 2)
