"""What a step of the gated delta rule or of Mamba2 is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from treegen.common.spec import DeltaSpec

# T rows, H value heads, G key heads, K key dim, V value dim, C channels, W width of a window,
# P pages of a list, B bytes of a page's part for one key head

BASE, LISTED, WINDOW, NEXT_WINDOW, PAGES = range(5)
READS, WRITES = range(2)
NUM_OWN: Final = 2
"""Inputs of rows with states of their own."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the recurrence of one layer is given beside its states.

    mixed_TC: queries, keys and values of all heads, before the convolution, in the order of
    `offsets`.
    a_TH, b_TH: what the gates and the strengths are made of. Mamba2 makes both of a_TH.
    conv_CW: weights of the convolution, as many columns as it sees tokens.
    a_log_H, dt_bias_H: weights of the gates.
    strength: what a strength is at most.
    conv_bias_C: of the convolution; None for none.
    skip_H: Mamba2's weights of each token's own value.
    """

    mixed_TC: Tensor
    a_TH: Tensor
    b_TH: Tensor
    conv_CW: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    strength: float
    conv_bias_C: Tensor | None = None
    skip_H: Tensor | None = None

    def rows(self, at: slice | Tensor) -> DeltaInputs:
        """The same of some rows."""
        return replace(self, mixed_TC=self.mixed_TC[at], a_TH=self.a_TH[at], b_TH=self.b_TH[at])


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """The states of one layer, in slots.

    windows: [slots, C, W] the last inputs of the convolution.
    states: [slots, H, K, V] float32. Pages of lists lie in it too, see `views`.
    spec: the sizes of the layer.
    """

    windows: Tensor
    states: Tensor
    spec: DeltaSpec

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values in lists."""
        return _DTYPES[self.spec.itemsize] if self.windows.dtype != torch.float16 else torch.float16

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """All pages of lists: gates [pages, G, N, H/G], keys [pages, G, N, K] and values
        [pages, G, N, H/G, V] of N updates each.

        Page p of slot s is page s * spec.pages + p.
        """
        spec = self.spec
        heads = spec.k_heads
        per_head = spec.v_heads // heads
        blocks = self.states.view(torch.uint8).view(len(self.states) * spec.pages, heads, -1)
        num, size = spec.page_tokens, spec.itemsize
        keys_at, values_at = page_offsets(spec)
        gates = blocks[:, :, : 4 * num * per_head].view(torch.float32)
        keys = blocks[:, :, keys_at : keys_at + num * spec.k_dim * size].view(self.dtype)
        values_to = values_at + num * per_head * spec.v_dim * size
        values = blocks[:, :, values_at:values_to].view(self.dtype)
        return (
            gates.unflatten(-1, (num, per_head)),
            keys.unflatten(-1, (num, spec.k_dim)),
            values.unflatten(-1, (num, per_head, spec.v_dim)),
        )


def offsets(spec: DeltaSpec) -> tuple[int, int, int]:
    """Channels at which queries, keys and values begin."""
    keys, values = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
    return (0, keys, 2 * keys) if spec.corrects else (values + keys, values, 0)


_DTYPES: Final = {2: torch.bfloat16, 4: torch.float32}


def page_offsets(spec: DeltaSpec) -> tuple[int, int]:
    """Where keys and values begin in a page's part for one key head, in bytes; gates come first."""
    gates = 4 * spec.page_tokens * (spec.v_heads // spec.k_heads)
    keys = -(-gates // 16) * 16
    return keys, keys + spec.page_tokens * spec.k_dim * spec.itemsize


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Where the states of T rows are, of which each has one token.

    inputs_RT: int64. Of rows with states of their own [2, T]: the slot that a row reads, and the
    one that it writes. Of rows with lists [4 + P, T]: the slot of the state that its list goes on
    from, how many updates it lists, the slots of its window before and after, and its pages. The
    update of this token is added to the list.
    """

    inputs_RT: Tensor

    @property
    def has_lists(self) -> bool:
        """Whether rows list updates."""
        return len(self.inputs_RT) > NUM_OWN

    @property
    def num_rows(self) -> int:
        """T, the number of rows."""
        return self.inputs_RT.shape[1]
