"""Which recurrent states a pass reads and writes: the tokens of a pass, split by sequence.

Other layers take the tokens of a pass as one row. A recurrent layer takes sequences side by side,
each from its own state. So the pass is cut into pieces (consecutive tokens of one sequence), and
pieces of equal length run together. A piece that starts from the final state of another piece of
the pass runs in a later stage.
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
from torch.nn.functional import pad

from treegen.common.closeable import use_context_value
from treegen.common.device import to_device, to_device_together
from treegen.ops.cache.state_cache import NO_STATE, StateCache
from treegen.ops.recurrence import DeltaStates, RowSlots, fold_update_lists

# N sequences that run together, L tokens of each

_MOST_TOKENS: Final = 2**14  # maximum tokens that run together; fewer for short pieces
_SHORT: Final = 64  # tokens that a piece is padded to in layers that compute chunks
_MOST_BYTES: Final = 2**28  # maximum bytes of one layer's states that run together


class Piece(NamedTuple):
    """Consecutive tokens of one sequence.

    Attributes:
        start: The row of its first token in the pass.
        num: Its number of tokens.
        reads: The slot of the state before it; NO_STATE at the start of a text.
        writes: The slot of the state after it.
    """

    start: int
    num: int
    reads: int
    writes: int


class Sequences(NamedTuple):
    """N sequences of equal length, which `treegen.ops.recurrence.scan` computes.

    Attributes:
        rows: The rows of their tokens in the pass.
        reads_N: Slots of their states before; -1 at the start of texts.
        writes_N: Slots of their states after.
        num_tokens: Tokens of each.
    """

    rows: slice | Tensor
    reads_N: Tensor
    writes_N: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateRun:
    """Pieces of equal length that run together.

    Attributes:
        num: N, the number of pieces.
        length: L, the tokens of each.
        rows: The rows of their N * L tokens in the pass.
        reads_N: int64, slots of the states before; None at the start of texts.
        writes_N: int64, slots of the states after.
    """

    num: int
    length: int
    rows: slice | Tensor
    reads_N: Tensor | None
    writes_N: Tensor

    @property
    def one_token(self) -> RowSlots | None:
        """The slots of sequences that continue by one token each; None for any other run."""
        if self.length > 1 or self.reads_N is None:
            return None
        return RowSlots(torch.stack([self.reads_N, self.writes_N]))

    @property
    def sequences(self) -> Sequences:
        """The run as sequences that are computed a token at a time."""
        reads_N = torch.full_like(self.writes_N, -1) if self.reads_N is None else self.reads_N
        return Sequences(self.rows, reads_N, self.writes_N, self.length)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The recurrent states that a pass reads and writes.

    Attributes:
        runs: Its runs, in order; empty if the rows of a decode step have update lists.
        layers: The state tensors of each recurrent layer.
        rows: The state slots of a decode step's rows; None for other passes.
        in_order: Whether a token's sums have the same order in every pass. Rows then have no lists.
    """

    runs: Sequence[StateRun]
    layers: Sequence[Sequence[Tensor]]
    rows: RowSlots | None = None
    in_order: bool = False

    def with_rows(self, missing: int) -> StateBatch:
        """Return this pass in order, with `missing` more rows that write to the spare slot."""
        rows = self.rows
        if rows is not None and missing:
            reads_T, writes_T = rows.inputs_RT
            ends = pad(reads_T, (0, missing), value=-1), pad(writes_T, (0, missing), value=NO_STATE)
            rows = RowSlots(torch.stack(ends))
        return replace(self, rows=rows, in_order=True)

    def in_sequences(self, out: Tensor, compute: Callable[[Sequences], Tensor]) -> Tensor:
        """Fill out [T, ...] with results for the sequences of a pass, and with zeros elsewhere.

        Args:
            out: The outputs; overwritten, unless all rows are computed at once.
            compute: Returns the outputs of sequences.

        Returns:
            The outputs [T, ...].
        """
        if self.rows is not None:
            reads_T, writes_T = self.rows.inputs_RT
            return compute(Sequences(slice(None), reads_T, writes_T, 1))
        out.zero_()  # for spare rows
        for run in self.runs:
            out[run.rows] = compute(run.sequences)
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
        groups.setdefault((stage, piece.num, piece.reads == NO_STATE), []).append(piece)
    device = layers[0][0].device
    runs: list[StateRun] = []
    for (_, length, is_first), group in sorted(groups.items(), key=lambda item: item[0][0]):
        most = _most_together(length, layers)
        for at in range(0, len(group), most):
            runs.append(_run(group[at : at + most], length, is_first, device))
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
        most, (reads_N, writes_N) = _most_together(1, layers), rows.inputs_RT
        for at in range(0, rows.num_rows, most):
            part = slice(at, min(at + most, rows.num_rows))
            runs.append(StateRun(part.stop - at, 1, part, reads_N[part], writes_N[part]))
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
    return 8 * max((min(num * size, max(_MOST_BYTES, size)) for size in layers), default=0)


def _most_together(length: int, layers: Sequence[Sequence[Tensor]]) -> int:
    largest = max(sum(tensor[0].nbytes for tensor in tensors) for tensors in layers)
    by_tokens = _MOST_TOKENS // max(length, _SHORT) if length > 1 else _MOST_TOKENS
    return max(min(by_tokens, _MOST_BYTES // max(largest, 1)), 1)


def _stages(pieces: Sequence[Piece]) -> list[int]:
    """Return for each piece how many pieces of the pass must be computed before it, in sequence."""
    made_by = {piece.writes: at for at, piece in enumerate(pieces)}
    stages: dict[int, int] = {}
    for first in range(len(pieces)):
        path = [first]
        while path[-1] not in stages:
            reads = pieces[path[-1]].reads
            above = made_by.get(reads, path[-1]) if reads != NO_STATE else path[-1]
            if above == path[-1]:  # its state exists already, maybe in the slot it writes
                stages[above] = 0
            else:
                assert above not in path, "states are made of one another"
                path.append(above)
        for above, below in zip(path[:0:-1], path[-2::-1], strict=True):
            stages[below] = stages[above] + 1
    return [stages[at] for at in range(len(pieces))]


def _run(group: Sequence[Piece], length: int, is_first: bool, device: torch.device) -> StateRun:
    starts = np.array([piece.start for piece in group])
    reads = np.array([piece.reads for piece in group], dtype=np.int64)
    writes = np.array([piece.writes for piece in group], dtype=np.int64)
    rows = (starts[:, None] + np.arange(length)).reshape(-1).astype(np.int64)
    reads_N, writes_N, rows_NL = to_device_together([reads, writes, rows], device)
    first = int(rows[0])
    consecutive = np.array_equal(rows, np.arange(first, first + len(rows)))
    return StateRun(
        num=len(group),
        length=length,
        rows=slice(first, first + len(rows)) if consecutive else rows_NL,
        reads_N=None if is_first else reads_N,
        writes_N=writes_N,
    )
