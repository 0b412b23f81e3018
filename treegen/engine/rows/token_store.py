"""Stores generated tokens in blocks that samples allocate as they grow.

Memory grows with the total number of tokens, not with the number of samples times the longest one.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from treegen.ops.sampling.draw import HostDraws

_BLOCK_BITS: Final = 6
_BLOCK_SIZE: Final = 1 << _BLOCK_BITS  # tokens

NUM_SIGNALS: Final = 2  # number of signals in `treegen.ops.sampling.confidence`

_Ints = NDArray[np.int64]


class TokenStore:
    """Tokens of slots, their log-probabilities and signals, in the order of generation.

    Attributes:
        tokens, logprobs: [blocks, tokens of a block].
        top_tokens, top_logprobs: [blocks, tokens of a block, num_logprobs], the most likely
            alternatives.
        signals: [blocks, tokens of a block, 2], confidence and self-certainty; [.., .., 0] until
            `record_signals` is called.
        versions: [blocks, tokens of a block, 1], the version of the weights that drew each token;
            [.., .., 0] until `record_versions` is called.
    """

    _PER_TOKEN = ("tokens", "logprobs", "top_tokens", "top_logprobs", "signals", "versions")

    def __init__(self, num_logprobs: int) -> None:
        """Set up an empty store that records `num_logprobs` alternatives per token."""
        self.tokens = np.zeros((0, _BLOCK_SIZE), dtype=np.int32)
        self.logprobs = np.zeros((0, _BLOCK_SIZE), dtype=np.float32)
        self.top_tokens = np.zeros((0, _BLOCK_SIZE, num_logprobs), dtype=np.int32)
        self.top_logprobs = np.zeros((0, _BLOCK_SIZE, num_logprobs), dtype=np.float32)
        self.signals = np.zeros((0, _BLOCK_SIZE, 0), dtype=np.float32)
        self.versions = np.zeros((0, _BLOCK_SIZE, 0), dtype=np.int32)
        self._blocks = np.zeros((0, 4), dtype=np.int64)  # blocks of each slot, [slots, blocks]
        self._free = np.empty(0, dtype=np.int64)

    def add_slots(self, num: int) -> None:
        """Grow to `num` slots, which must not be fewer than before."""
        self._blocks = grow_array(self._blocks, num, self._blocks.shape[1])

    def widen(self, num_logprobs: int) -> None:
        """Record `num_logprobs` alternatives per token from now on, not fewer than before."""
        for name in ("top_tokens", "top_logprobs"):
            array = getattr(self, name)
            setattr(self, name, grow_array(array, *array.shape[:2], num_logprobs))

    def record_signals(self) -> None:
        """Record signals from now on."""
        self.signals = grow_array(self.signals, *self.signals.shape[:2], NUM_SIGNALS)

    def record_versions(self) -> None:
        """Record versions from now on; those of earlier tokens are 0 unless they are recorded."""
        self.versions = grow_array(self.versions, *self.versions.shape[:2], 1)

    def append(self, slots: _Ints, counts: _Ints, draws: HostDraws, version: int) -> None:
        """Record one more token for each slot.

        Args:
            slots: Slots, [N].
            counts: Number of tokens of each slot before this one, [N].
            draws: The tokens, and what is reported of each, [N].
            version: The version of the weights.
        """
        column, within = counts >> _BLOCK_BITS, counts & (_BLOCK_SIZE - 1)
        fresh = np.flatnonzero(within == 0)
        if len(fresh):
            self._allocate_blocks(slots[fresh], column[fresh])
        block = self._blocks[slots, column]
        at = (block << _BLOCK_BITS) + within
        self.tokens.reshape(-1)[at] = draws.tokens
        self.logprobs.reshape(-1)[at] = draws.logprobs
        if draws.top_tokens is not None:
            num = draws.top_tokens.shape[-1]
            self.top_tokens[block, within, :num] = draws.top_tokens
            self.top_logprobs[block, within, :num] = draws.top_logprobs
        if draws.signals is not None:
            self.signals[block, within] = draws.signals
        if self.versions.shape[-1]:
            self.versions[block, within] = version

    def release(self, slots: _Ints, counts: _Ints) -> None:
        """Free the blocks of slots, which have `counts` tokens."""
        blocks, _ = self._blocks_of(slots, counts)
        self._free = np.concatenate([self._free, blocks])

    def between(self, slot: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return some tokens of a slot.

        Args:
            slot: The slot.
            start: Index of the first token.
            stop: Index after the last token.
        """
        return self.part(self.tokens, slot, start, stop)

    def part(self, array: NDArray[Any], slot: int, start: int, stop: int) -> NDArray[Any]:
        """Return the elements of one array for some tokens of a slot.

        Args:
            array: One of the arrays of the store.
            slot: The slot.
            start: Index of the first token.
            stop: Index after the last token.
        """
        first = start >> _BLOCK_BITS
        blocks = self._blocks[slot, first : -(-stop >> _BLOCK_BITS)]
        flat = array[blocks].reshape(-1, *array.shape[2:])
        return flat[start - (first << _BLOCK_BITS) : stop - (first << _BLOCK_BITS)]

    def at(self, array: NDArray[Any], slots: _Ints, index: _Ints) -> NDArray[Any]:
        """Return the elements of one array for one token of each slot.

        Args:
            array: One of the arrays of the store.
            slots: Slots, [N].
            index: Index of the token in each slot, [N].
        """
        elements: NDArray[Any] = array[
            self._blocks[slots, index >> _BLOCK_BITS], index & (_BLOCK_SIZE - 1)
        ]
        return elements

    def numbers(
        self, slots: _Ints, counts: _Ints, array: NDArray[np.generic]
    ) -> list[tuple[Any, ...]]:
        """Return the elements of one array for all tokens of each slot, as one flat tuple per slot.

        Args:
            slots: Slots, [N].
            counts: Number of tokens of each slot, [N].
            array: One of the arrays of the store.
        """
        blocks, first = self._blocks_of(slots, counts)
        numbers, stride = array[blocks].tobytes(), array[:1].nbytes
        sizes = (counts * math.prod(array.shape[2:])).tolist()
        # Unlike tolist(), this creates tuples without creating lists first.
        unpack = {n: struct.Struct(f"{n}{array.dtype.char}").unpack_from for n in set(sizes)}
        starts = (first * stride).tolist()
        return [unpack[n](numbers, start) for n, start in zip(sizes, starts, strict=True)]

    def _blocks_of(self, slots: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
        """Return the blocks of slots, slot by slot, and the index of each slot's first block.

        Args:
            slots: Slots, [N].
            counts: Number of tokens of each slot, [N].
        """
        num = (counts + _BLOCK_SIZE - 1) >> _BLOCK_BITS
        columns = np.arange(num.max(initial=0))
        blocks = self._blocks[slots, : len(columns)][columns < num[:, None]]
        return blocks, num.cumsum() - num

    def _allocate_blocks(self, slots: _Ints, column: _Ints) -> None:
        """Give each slot one more block, at index `column` of the slot's blocks."""
        num_missing = len(slots) - len(self._free)
        if num_missing > 0:
            old = len(self.tokens)
            new = old + max(num_missing, old // 2)
            for name in self._PER_TOKEN:
                array = getattr(self, name)
                setattr(self, name, grow_array(array, new, *array.shape[1:]))
            self._free = np.concatenate([self._free, np.arange(old, new)])
        width = int(column.max()) + 1
        if width > self._blocks.shape[1]:
            num_slots, old_width = self._blocks.shape
            self._blocks = grow_array(self._blocks, num_slots, max(width, 2 * old_width))
        self._blocks[slots, column] = self._free[len(self._free) - len(slots) :]
        self._free = self._free[: len(self._free) - len(slots)]


def grow_arrays(owner: object, num: int, fill: int = 0) -> None:
    """Grow every array attribute of an object that is shorter.

    Args:
        owner: The object.
        num: New length of the first dimension.
        fill: Value of the new elements.
    """
    for name, array in list(vars(owner).items()):
        if isinstance(array, np.ndarray) and len(array) < num:
            more = np.full((num - len(array), *array.shape[1:]), fill, dtype=array.dtype)
            setattr(owner, name, np.concatenate([array, more]))


def grow_array(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """Return a copy of an array in a larger shape, with zeros as new elements."""
    larger = np.zeros(shape, dtype=array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
