"""The text before each draw, read on the device from the token ids in the KV cache.

A cache slot holds a token's id in addition to its key and value. So a row's text is found through
the page tables of its levels, and forks, preemption and rejected drafts need no bookkeeping of it.

Shape letters: P distributions, G groups of a level, L tokens of the longest text, I runs of drawn
tokens, S cache slots, N pages of a group, K keys of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device_together
from treegen.ops.attention import HostLevel

NOTHING: Final = -1
"""The entry of a position at which a text has no token."""

_MEMO: Final = "texts"


@dataclass(frozen=True, slots=True, eq=False)
class _LevelTokens:
    """The tokens of the texts that are in one level."""

    group_P: Tensor
    """The level's group that has tokens of each text; -1 if none has."""
    pages_GN: Tensor
    """Pages of each group."""
    length_G: Tensor
    """Number of keys of each group."""
    start_G: Tensor
    """Position of the first key of each group."""

    @staticmethod
    def of(level: HostLevel, num: int, device: torch.device) -> _LevelTokens:
        """Return a level's part of the texts, cached in the level, which may serve many steps.

        Args:
            level: The level.
            num: P, the number of texts.
            device: Where the texts are read.
        """
        tokens: _LevelTokens | None = level.memo.get((_MEMO, num))
        if tokens is None:
            rows = np.arange(num)
            group_P = np.searchsorted(level.start_G, rows, side="right") - 1
            group_P[rows >= level.stop_G[group_P]] = -1
            pages_GP = level.pages_GP if level.stored_GP is None else level.stored_GP
            arrays = [group_P, pages_GP, level.kv_len_G, level.kv_start_G]
            tokens = level.memo[_MEMO, num] = _LevelTokens(*to_device_together(arrays, device))
        return tokens

    def read(self, tokens_S: Tensor, page_size: int, text_PL: Tensor, length_P: Tensor) -> None:
        """Write this level's tokens to their positions in the texts.

        Args:
            tokens_S: The token in each cache slot, int32 [S].
            page_size: Slots per page.
            text_PL: The texts [P, L + 1], changed in place. The last column takes entries that
                belong to no text.
            length_P: Number of tokens of each text [P].
        """
        group_P = self.group_P.clamp(min=0)
        offset_N = torch.arange(page_size, device=tokens_S.device)
        slots_PK = (self.pages_GN[:, :, None] * page_size + offset_N).flatten(1)[group_P]
        key_K = torch.arange(slots_PK.shape[1], device=tokens_S.device)
        position_PK = self.start_G[group_P, None] + key_K
        is_key_PK = (key_K < self.length_G[group_P, None]) & (position_PK < length_P[:, None])
        is_key_PK &= self.group_P[:, None] >= 0
        column_PK = torch.where(is_key_PK, position_PK, text_PL.shape[1] - 1)
        text_PL.scatter_(1, column_PK, tokens_S[slots_PK])


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """The texts before P draws."""

    tokens_S: Tensor
    """int32, the token in each cache slot."""
    page_size: int
    """Slots per page."""
    parts: Sequence[_LevelTokens]
    """The tokens of each level."""
    length_P: Tensor
    """Number of tokens of each text."""
    longest: int
    """Number of tokens of the longest text."""
    drawn_PI2: Tensor
    """The first position and the end of each run of tokens that the model has drawn, as opposed to
    tokens of a prompt."""

    @staticmethod
    def of(
        tokens_S: Tensor,
        page_size: int,
        levels: Sequence[HostLevel],
        lengths: NDArray[np.int64],
        generated_spans: NDArray[np.int64],
    ) -> TokenHistory:
        """Return the texts of P rows, which are in the keys of their levels.

        Args:
            tokens_S: The token in each cache slot, int32 [S].
            page_size: Slots per page.
            levels: The levels of the pass.
            lengths: Number of tokens of each text [P].
            generated_spans: First position and end of each run of drawn tokens [P, I, 2].
        """
        device, num = tokens_S.device, len(lengths)
        parts = [_LevelTokens.of(level, num, device) for level in levels if len(level.start_G)]
        length_P, drawn_PI2 = to_device_together([lengths, generated_spans], device)
        return TokenHistory(
            tokens_S, page_size, parts, length_P, int(lengths.max(initial=0)), drawn_PI2
        )

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the tokens, int64 [P, L] padded with NOTHING, and which were drawn [P, L]."""
        shape = len(self.length_P), self.longest + 1
        text_PL = torch.full(shape, NOTHING, dtype=torch.int32, device=self.tokens_S.device)
        for part in self.parts:
            part.read(self.tokens_S, self.page_size, text_PL, self.length_P)
        text_PL = text_PL[:, :-1].long()
        at_L = torch.arange(self.longest, device=text_PL.device)
        start_PI1, stop_PI1 = self.drawn_PI2[..., None].unbind(2)
        drawn_PL = ((at_L >= start_PI1) & (at_L < stop_PI1)).any(dim=1)
        return text_PL, drawn_PL & (text_PL >= 0)
