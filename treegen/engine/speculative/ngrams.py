"""An n-gram drafter: it proposes what other samples continued with after the same last tokens.

Each token that a row draws is entered in a hash table under the last n tokens before it, for
several n, once in the scope of its prompt's samples and once in that of the run. A row looks up its
own last tokens, finds an entry in the log of all tokens, and drafts the tokens that followed there.
The log is linked: each entry knows the next one of its row. So a few array operations record the
tokens of all rows.

Legend: R rows, A new tokens of a row, W tokens of a window, S keys (an n and a scope), N entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treegen.common.drafter import NOTHING, Drafts, Ints, NewTokens, PromptInfo


class _Key(NamedTuple):
    """A kind of table key: n last tokens, in the scope of one prompt or of the run."""

    size: int
    is_own: bool
    chance: float  # acceptance rate before any draft token was tried


_KEYS: Final = (
    _Key(8, True, 0.8),
    _Key(8, False, 0.7),
    _Key(5, True, 0.7),
    _Key(5, False, 0.6),
    _Key(3, True, 0.6),
    _Key(2, True, 0.45),
    _Key(3, False, 0.45),
    _Key(2, False, 0.3),
    _Key(1, True, 0.2),
)
_WINDOW: Final = max(key.size for key in _KEYS)
_MAX_VOTES: Final = 100
# The grade of a draft token by the number of votes: 1, 2, 3, 4 or 5, 6 to 11, more.
_GRADE_OF_VOTES: Final = np.searchsorted([2, 3, 4, 6, 12], np.arange(_MAX_VOTES + 2), side="right")
_NUM_GRADES: Final = int(_GRADE_OF_VOTES.max()) + 1
_LATER_RATE: Final = 0.55  # acceptance rate of further draft tokens, before any was tried
_BUCKET_BITS: Final = 21  # log2 of the number of buckets of the table
_MAX_ENTRIES: Final = 2**23  # maximum number of tokens in the log, which is cleared when it is full
_MAX_PROMPT_TOKENS: Final = 1024  # only this number of last tokens of a prompt are entered
_MAX_PROMPTS: Final = 1024  # maximum number of prompts whose last tokens are remembered
_PRIOR_WEIGHT: Final = 8.0  # prior weight of first estimates, in tried tokens
_DECAY: Final = 0.99  # weight of earlier steps, relative to the next step

_U64 = np.uint64
_HASH_BASE: Final = 0x9E3779B97F4A7C15
_HASH_MIX: Final = 0xD6E8FEB86659FD93
_SCOPE_FACTOR: Final = 0xA24BAED4963EE407


class NgramDrafter:
    """Proposes draft tokens by the last tokens of rows."""

    def __init__(self) -> None:
        """Set up an empty table."""
        # The hash of the last n tokens is a sum of tokens times powers: the last token times the
        # first power, and so on.
        powers = [pow(_HASH_BASE, _WINDOW - i, 2**64) for i in range(_WINDOW)]
        self._powers_WS = np.array(
            [[p * (i >= _WINDOW - key.size) for key in _KEYS] for i, p in enumerate(powers)], _U64
        )
        self._salt_S = np.array([pow(_HASH_MIX, key.size, 2**64) for key in _KEYS], dtype=_U64)
        self._own_S = np.array([key.is_own for key in _KEYS], dtype=_U64)
        # By bucket: the log entry of the key's continuation, the key's fingerprint, and the votes
        # by which that continuation leads. Empty buckets have entry 0, which has no token.
        self._entry = np.zeros(1 << _BUCKET_BITS, dtype=np.int32)
        self._fingerprints = np.zeros(1 << _BUCKET_BITS, dtype=np.uint32)
        self._votes = np.zeros(1 << _BUCKET_BITS, dtype=np.int8)
        # The log: tokens, and the next entry of the same row, 0 while there is none.
        self._token = np.full(4096, NOTHING, dtype=np.int32)
        self._next = np.zeros(4096, dtype=np.int32)
        self._size = 1
        # By slot: the last tokens, the entry of the last one, and the number of the request.
        self._recent = np.zeros((0, _WINDOW), dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)
        self._scope = np.zeros(0, dtype=_U64)
        # Tokens that `run_deferred` logs: slots, scopes, texts, and number of new tokens of each.
        self._waiting: list[tuple[Ints, NDArray[_U64], Ints, Ints]] = []
        # By request: the last tokens of the prompt, and the entry of the last one.
        self._prompts: dict[int, tuple[Ints, int]] = {}
        chances = np.array([key.chance for key in _KEYS])[:, None]
        gains = np.linspace(0.0, 0.5, _NUM_GRADES)  # of grades, as shares of the remaining rate
        # By kind: how many first and further draft tokens were accepted, and how many were tried.
        first = ((1 - (1 - chances) * (1 - gains)) * _PRIOR_WEIGHT).reshape(-1)
        self._accepted_2K = np.stack([first, np.full(first.shape, _LATER_RATE * _PRIOR_WEIGHT)])
        self._tried_2K = np.full(self._accepted_2K.shape, _PRIOR_WEIGHT)
        self._chance_2K = self._accepted_2K / self._tried_2K

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Queue drawn tokens of rows, which `run_deferred` enters during the next step."""
        self._ensure_capacity(int(new.slots.max(initial=-1)) + 1, 0)
        first = np.flatnonzero(new.count == 0)
        if len(first):
            self._start_rows(new.slots[first], new.request[first], request_of)
        text_RX = np.concatenate([self._recent[new.slots], new.tokens_RA], axis=1)
        self._waiting.append((new.slots, self._scope[new.slots], text_RX, new.num_R))
        offsets_W = np.arange(_WINDOW)
        rows = np.arange(len(new.slots))[:, None]
        self._recent[new.slots] = text_RX[rows, new.num_R[:, None] + offsets_W]

    def run_deferred(self) -> None:
        """Log and enter the queued tokens."""
        waiting, self._waiting = self._waiting, []
        for observation in waiting:
            self._log(*observation)

    def _log(self, slots: Ints, scope_R: NDArray[_U64], text_RX: Ints, num_R: Ints) -> None:
        """Log the tokens of rows and enter them in the table.

        Args:
            slots: Slots of the rows, [R].
            scope_R: Scope of each row's prompt.
            text_RX: The last tokens of each row before the new ones, then the new ones, [R, W + A].
            num_R: Number of new tokens of each row.
        """
        self._ensure_capacity(0, int(num_R.sum()))
        windows_RAW = np.lib.stride_tricks.sliding_window_view(text_RX, _WINDOW, axis=1)
        is_new_RA = np.arange(text_RX.shape[1] - _WINDOW) < num_R[:, None]
        row_N, at_N = np.nonzero(is_new_RA)
        entry_N = self._append(text_RX[:, _WINDOW:][is_new_RA], num_R, self._last[slots])
        self._insert(windows_RAW[row_N, at_N], scope_R[row_N], entry_N)
        self._last[slots] = entry_N[num_R.cumsum() - 1]

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Return the tokens that followed the last tokens of rows elsewhere.

        Args:
            slots: Slots of the rows, [R].
            room_R: Maximum number of draft tokens of each row, [R].
        """
        bucket_RS, fingerprint_RS = self._find_buckets(self._recent[slots], self._scope[slots])
        is_hit_RS = self._fingerprints[bucket_RS] == fingerprint_RS
        kind_RS = _GRADE_OF_VOTES[self._votes[bucket_RS]] + _NUM_GRADES * np.arange(len(_KEYS))
        chance_RS = np.where(is_hit_RS, self._chance_2K[0][kind_RS], 0.0)
        best_R = chance_RS.argmax(axis=1)
        rows = np.arange(len(slots))
        entry_R = np.where(is_hit_RS[rows, best_R], self._entry[bucket_RS[rows, best_R]], 0)
        tokens_RK = np.empty((len(slots), int(room_R.max(initial=0))), dtype=np.int64)
        for column in tokens_RK.T:
            column[:] = self._token[entry_R]
            entry_R = self._next[entry_R]
        kind_R = kind_RS[rows, best_R]
        return Drafts(tokens_RK, chance_RS[rows, best_R], kind_R, self._chance_2K[1][kind_R])

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """Update the estimated acceptance rates of each kind of draft tokens.

        Args:
            kind_R: Kind of each row's draft tokens, [R].
            tried_R: Number of tried draft tokens of each row, [R].
            accepted_R: Number of accepted draft tokens of each row, [R].
        """
        size = len(self._chance_2K[0])
        is_first_R = tried_R > 0
        for index, (tried, accepted) in enumerate(
            [(is_first_R, accepted_R > 0), (tried_R - is_first_R, accepted_R - (accepted_R > 0))]
        ):
            self._tried_2K[index] *= _DECAY
            self._accepted_2K[index] *= _DECAY
            self._tried_2K[index] += np.bincount(kind_R, tried, size)
            self._accepted_2K[index] += np.bincount(kind_R, accepted, size)
        self._chance_2K = self._accepted_2K / self._tried_2K

    def _start_rows(
        self, slots: Ints, request: Ints, request_of: Callable[[int], PromptInfo]
    ) -> None:
        """Start rows after their prompts, which are entered if they are new."""
        self.run_deferred()  # enters the tokens of earlier rows in these slots
        for number in np.unique(request).tolist():
            if number not in self._prompts:
                if len(self._prompts) >= _MAX_PROMPTS:  # rows of a request start together
                    self._prompts.clear()
                self._prompts[number] = self._insert_prompt(number, request_of(number).tokens)
            request_slots = slots[request == number]
            self._recent[request_slots], self._last[request_slots] = self._prompts[number]
            self._scope[request_slots] = _scope_of(number)

    def _insert_prompt(self, number: int, prompt: Any) -> tuple[Ints, int]:
        tokens = np.asarray(prompt, dtype=np.int64)[-_MAX_PROMPT_TOKENS:]
        num = len(tokens)
        self._ensure_capacity(0, num)
        text = np.concatenate([np.full(_WINDOW, NOTHING), tokens])
        windows_NW = np.lib.stride_tricks.sliding_window_view(text, _WINDOW)
        if not num:
            return text[-_WINDOW:].copy(), 0
        entry_N = self._append(tokens, np.array([num]), np.zeros(1, np.int64))
        self._insert(windows_NW[:-1], np.full(num, _scope_of(number)), entry_N)
        return text[-_WINDOW:].copy(), int(entry_N[-1])

    def _append(self, tokens_N: Ints, num_R: Ints, before_R: Ints) -> Ints:
        """Add tokens of rows to the log; return their entries.

        Args:
            tokens_N: The tokens, row by row.
            num_R: Number of tokens of each row.
            before_R: Entry of each row's last token before these.
        """
        entry_N = np.arange(self._size, self._size + len(tokens_N))
        self._size += len(tokens_N)
        self._token[entry_N] = tokens_N
        self._next[entry_N] = entry_N + 1
        stop_R = num_R.cumsum()
        self._next[entry_N[stop_R - 1]] = 0
        self._next[before_R] = entry_N[stop_R - num_R]
        self._next[0] = 0
        return entry_N

    def _insert(self, windows_NW: Ints, scope_N: NDArray[_U64], entry_N: Ints) -> None:
        """Enter tokens in the table under the tokens before them.

        If tokens disagree, the one with the most votes stays. It is older, so the log has more
        tokens that followed it.

        Args:
            windows_NW: The tokens before each entered token.
            scope_N: Scope of the prompt of each.
            entry_N: Log entry of each.
        """
        bucket_NS, fingerprint_NS = self._find_buckets(windows_NW, scope_N)
        old_NS, votes_NS = self._entry[bucket_NS], self._votes[bucket_NS]
        same_NS = self._fingerprints[bucket_NS] == fingerprint_NS
        agree_NS = self._token[old_NS] == self._token[entry_N][:, None]
        stays_NS = same_NS & (agree_NS | (votes_NS > 1))
        change_NS = np.where(agree_NS, 1, -1).astype(np.int8)
        self._votes[bucket_NS] = np.where(stays_NS, np.minimum(votes_NS, _MAX_VOTES) + change_NS, 1)
        self._entry[bucket_NS] = np.where(stays_NS, old_NS, entry_N[:, None])
        self._fingerprints[bucket_NS] = fingerprint_NS

    def _find_buckets(
        self, windows_NW: Ints, scope_N: NDArray[_U64]
    ) -> tuple[Ints, NDArray[np.uint32]]:
        """Return the buckets of windows by key, [N, S], and their fingerprints."""
        hash_NS = (windows_NW + 1).view(_U64) @ self._powers_WS
        hash_NS += self._own_S * scope_N[:, None] + self._salt_S
        hash_NS ^= hash_NS >> _U64(31)
        hash_NS *= _U64(_HASH_MIX)
        buckets = (hash_NS >> _U64(64 - _BUCKET_BITS)).view(np.int64)
        return buckets, hash_NS.astype(np.uint32) | np.uint32(1)

    def _ensure_capacity(self, num_slots: int, num_tokens: int) -> None:
        num_new = num_slots - len(self._last)
        if num_new > 0:
            num_new = max(num_new, len(self._last))
            self._recent = np.pad(self._recent, ((0, num_new), (0, 0)), constant_values=NOTHING)
            self._last = np.pad(self._last, (0, num_new))
            self._scope = np.pad(self._scope, (0, num_new))
        needed = self._size + num_tokens
        if needed > _MAX_ENTRIES:
            self._entry[:] = self._last[:] = self._fingerprints[:] = 0
            self._next[:] = 0
            self._prompts = {number: (text, 0) for number, (text, _) in self._prompts.items()}
            self._size = 1
        elif needed > len(self._token):
            size = min(max(needed, 2 * len(self._token)), _MAX_ENTRIES)
            for name in ("_token", "_next"):
                array = getattr(self, name)
                setattr(
                    self, name, np.concatenate([array, np.zeros(size - len(array), array.dtype)])
                )


def _scope_of(request: int) -> np.uint64:
    """Return a hash that separates the tokens of a request from those of other requests."""
    return _U64((request + 1) * _SCOPE_FACTOR % 2**64)
