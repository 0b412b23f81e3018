"""The samples being decoded, as arrays: one slot per sample, no Python object per row.

A slot holds the generated tokens of a sample and, while it is live, the page table of these tokens.
Slots are reused; a separate array of slots has the order in which rows are decoded.

VerifyInput has the draft tokens that a step verifies: their query rows, and which are accepted.

Legend: R rows, K maximum number of draft tokens of a row, T query rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints, expand_offsets
from treegen.engine.rows.token_store import TokenStore, grow_array, grow_arrays
from treegen.ops.cache.pool import Pages
from treegen.ops.sampling.draw import HostDraws


class RowPhase(IntEnum):
    """The phase of the row in a slot, which only `RowQueue` changes.

    Phase     Meaning                                 Allowed next phases
    FREE      the slot has no row                     DRAWN
    DRAWN     its first token is being drawn          PARKED, ENDED, FREE
    PARKED    its prompt's keys are not computed      READY, FREE
    READY     it waits for pages                      RESUMING, LIVE, PARKED, FREE
    RESUMING  its own keys are computed again         LIVE, READY, FREE
    LIVE      a decode step draws its next token      READY, ENDED, FREE
    ENDED     its sample is not reported yet          FREE

    A row becomes FREE when its sample is cancelled or reported.
    Only RESUMING and LIVE rows hold pages.
    """

    FREE = 0
    DRAWN = 1
    PARKED = 2
    READY = 3
    RESUMING = 4
    LIVE = 5
    ENDED = 6


class RowTable:
    """Arrays over slots; all grow by doubling.

    Attributes:
        phase: A `RowPhase`.
        request: Index of the request.
        sample: Index of the sample in the request.
        key: Sort key of slots, depth first.
        seed: Seed of the sample's draws.
        stop: Number of prompt tokens.
        limit: Maximum number of tokens to generate.
        params: Index of the sampling parameters.
        serial: A number that no other row of the run has; -1 once the slot is released.
        count: Number of tokens generated so far.
        last: The last generated token.
        table: The row's own pages.
        num_pages: Number of these pages.
        base: Position of the first token in these pages.
        chain: Cascaded segments that the row reads above these pages, root first, then -1.
        generated: The generated tokens, with their log-probabilities and signals.
        shift: Shift of rotary positions by images in the prompt; see `MRopePositions`.
    """

    def __init__(self, num_logprobs: int = 0) -> None:
        """Set up an empty table that records `num_logprobs` alternatives per token."""
        self.num_logprobs = num_logprobs
        self.phase = np.zeros(0, dtype=np.int8)
        numbers: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.request = self.sample = self.key = self.seed = self.stop = self.limit = numbers
        self.params = self.serial = self.count = self.last = self.base = self.num_pages = numbers
        self.shift = numbers
        self._num_added = 0
        self.chain = np.full((0, 1), -1, dtype=np.int64)
        self.table = np.zeros((0, 4), dtype=np.int32)
        self.generated = TokenStore(num_logprobs)
        self._free: list[int] = []

    def record(self, num_logprobs: int) -> None:
        """Record at least `num_logprobs` alternatives per token from now on."""
        if num_logprobs > self.num_logprobs:
            self.num_logprobs = num_logprobs
            self.generated.widen(num_logprobs)

    def add(self, num: int) -> NDArray[np.int64]:
        """Allocate `num` slots and return them; the caller fills them."""
        if num > len(self._free):
            old = len(self.request)
            new = max(2 * old, old + num, 64)
            grow_arrays(self, new)
            self.generated.add_slots(new)
            self._free.extend(range(new - 1, old - 1, -1))
        slots = np.array([self._free.pop() for _ in range(num)], dtype=np.int64)
        self.serial[slots] = np.arange(self._num_added, self._num_added + num)
        self._num_added += num
        self.count[slots] = 0
        self.num_pages[slots] = 0
        return slots

    def release(self, slots: NDArray[np.int64]) -> None:
        """Release slots."""
        self.serial[slots] = -1
        self.generated.release(slots, self.count[slots])
        self._free.extend(slots.tolist())

    def used(self) -> NDArray[np.int64]:
        """Return the slots in use, in ascending order."""
        return np.setdiff1d(np.arange(len(self.request)), self._free)

    def append(
        self,
        slots: NDArray[np.int64],
        draws: HostDraws,
        token_index: NDArray[np.int64] | None = None,
        version: int = 0,
    ) -> None:
        """Record one generated token for each slot.

        Args:
            slots: Slots, [N].
            draws: The tokens, and what is reported of each, [N].
            token_index: If a slot occurs several times in a row, the index of each token among the
                slot's new tokens, [N]; None if each slot occurs once.
            version: The version of the weights.
        """
        counts = self.count[slots]
        if token_index is not None:
            counts += token_index
        self.generated.append(slots, counts, draws, version)
        self.last[slots] = draws.tokens  # if a slot occurs several times, its last token stays
        self.count[slots] = counts + 1

    def tokens(self, slots: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Return the generated tokens of each slot."""
        return self._numbers(slots, self.generated.tokens)

    def logprobs(self, slots: NDArray[np.int64]) -> list[tuple[float, ...]]:
        """Return the log-probabilities of the generated tokens of each slot."""
        return self._numbers(slots, self.generated.logprobs)

    def signals(self, slots: NDArray[np.int64]) -> list[tuple[float, ...]]:
        """Return the signals of all tokens of each slot, as one flat tuple per slot."""
        return self._numbers(slots, self.generated.signals)

    def versions(self, slots: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Return the version of the weights for each token of each slot; empty if all are 0."""
        if not self.generated.versions.shape[-1]:
            return [()] * len(slots)
        return self._numbers(slots, self.generated.versions)

    def alternatives(
        self, slots: NDArray[np.int64]
    ) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
        """Return the most likely tokens and their logprobs, as one flat tuple per slot each."""
        store = self.generated
        return self._numbers(slots, store.top_tokens), self._numbers(slots, store.top_logprobs)

    def _numbers(
        self, slots: NDArray[np.int64], array: NDArray[np.generic]
    ) -> list[tuple[Any, ...]]:
        return self.generated.numbers(slots, self.count[slots], array)

    def set_chain(self, slots: NDArray[np.int64], chain: Sequence[int]) -> None:
        """Set the cascaded segments that slots read as attention levels of their own."""
        num_missing = len(chain) - self.chain.shape[1]
        if num_missing > 0:
            self.chain = np.pad(self.chain, ((0, 0), (0, num_missing)), constant_values=-1)
        self.chain[slots] = -1
        self.chain[slots, : len(chain)] = chain

    def add_pages(
        self, slots: NDArray[np.int64], pages: Pages, num: NDArray[np.int64] | int = 1
    ) -> None:
        """Append pages to the table of each slot.

        Args:
            slots: Slots, [N].
            pages: The pages, slot by slot.
            num: Number of pages of each slot, [N], or one number for all.
        """
        at = self.num_pages[slots]
        num = np.broadcast_to(num, at.shape)
        width = int((at + num).max(initial=0))
        if width > self.table.shape[1]:
            self.table = grow_array(
                self.table, len(self.table), max(width, 2 * self.table.shape[1])
            )
        column = np.arange(len(pages)) + np.repeat(at + num - num.cumsum(), num)
        self.table[np.repeat(slots, num), column] = pages
        self.num_pages[slots] = at + num

    def take_pages(self, slots: NDArray[np.int64]) -> Pages:
        """Empty the page tables of slots and return their pages."""
        tables, sizes = self.table[slots], self.num_pages[slots]
        pages = tables[np.arange(tables.shape[1]) < sizes[:, None]]
        self.table[slots] = 0
        self.num_pages[slots] = 0
        return pages

    def take_tables(self, slots: NDArray[np.int64]) -> list[Pages]:
        """Empty the page tables of slots and return the pages of each slot."""
        sizes = self.num_pages[slots]
        stops, pages = sizes.cumsum().tolist(), self.take_pages(slots)
        # Copies, because one table that lives on would keep the memory of all.
        return [
            pages[stop - size : stop].copy()
            for stop, size in zip(stops, sizes.tolist(), strict=True)
        ]


class VerifyInput:
    """Draft tokens of R rows. Each row has one query row more than it has draft tokens.

    Attributes:
        num_R: Number of draft tokens of each row.
        kind_R: Kind of evidence behind each row's draft tokens.
        offsets: [R + 1], the query rows of row r are offsets[r] to offsets[r + 1].
        row_T, index_T: The row of each query row, and its index among those of the row.
    """

    def __init__(self, tokens_RK: Ints, num_R: Ints, kind_R: Ints) -> None:
        """Set up the draft tokens of a step.

        Args:
            tokens_RK: Draft tokens, [R, K]. Row r uses its first `num_R[r]` tokens.
            num_R: Number of draft tokens of each row, [R].
            kind_R: Kind of evidence behind each row's draft tokens, [R].
        """
        self.num_R, self.kind_R = num_R, kind_R
        self._tokens_RK = tokens_RK
        self._accepted_R: Ints | None = None
        self.offsets, self.row_T, self.index_T = expand_offsets(num_R + 1)

    def inputs(self, last_R: Ints) -> Ints:
        """Return the input token of each query row, [T]; `last_R` has each row's last token."""
        tokens = np.concatenate([last_R[:, None], self._tokens_RK], axis=1)
        return tokens[self.row_T, self.index_T]

    def of_row(self, row: int) -> list[int]:
        """Return the draft tokens of a row."""
        tokens: list[int] = self._tokens_RK[row, : self.num_R[row]].tolist()
        return tokens

    def num_accepted(self, drawn_T: Ints) -> Ints:
        """Return how many draft tokens of each row, from the first on, the row has drawn.

        Args:
            drawn_T: Drawn token of each query row, [T]; the same at each call, since the result is
                kept.
        """
        if self._accepted_R is None:
            width = self._tokens_RK.shape[1]
            column_K = np.arange(width)
            at_RK = np.minimum(self.offsets[:-1, None] + column_K, len(self.row_T) - 1)
            wrong_RK = drawn_T[at_RK] != self._tokens_RK
            wrong_RK |= column_K >= self.num_R[:, None]
            self._accepted_R = np.where(wrong_RK.any(axis=1), wrong_RK.argmax(axis=1), width)
        return self._accepted_R

    def find_accepted_rows(self, drawn_T: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the query rows whose draws count, and whether each is the last of its row."""
        remaining_T = self.num_accepted(drawn_T)[self.row_T] - self.index_T
        draws = np.flatnonzero(remaining_T >= 0)
        return draws, remaining_T[draws] == 0
