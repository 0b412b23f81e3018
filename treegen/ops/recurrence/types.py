"""Inputs, states and slots of the gated delta rule and of Mamba2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from treegen.common.spec import DeltaSpec

# Legend: T rows, H value heads, G key heads, K key dim, V value dim, C channels, W width of a
# window, P pages of an update list, N updates of a page, R rows of `RowSlots.inputs_RT`

BASE, LISTED, WINDOW, NEXT_WINDOW, PAGES = range(5)
READ_SLOTS, WRITE_SLOTS = range(2)
NUM_OWN: Final = 2
"""Number of rows of `RowSlots.inputs_RT` if the sequences have states of their own."""


class Convolution(NamedTuple):
    """A convolution of each channel, and the inputs that it keeps for later tokens."""

    weights_CW: Tensor
    """Weights, with one column for each token that the convolution sees."""
    bias_C: Tensor | None
    """Bias; None for none."""
    windows: Tensor
    """[slots, C, W] the last inputs of each slot, updated in place. W is at least the number of
    tokens that the convolution sees."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of one layer's recurrence, except for its states."""

    mixed_TC: Tensor
    """Queries, keys and values of all heads, before the convolution, in the order of `offsets`."""
    a_TH: Tensor
    """Inputs of the gates. Mamba2 computes the strengths from them as well."""
    b_TH: Tensor
    """Inputs of the strengths."""
    conv_CW: Tensor
    """Weights of the convolution, with one column for each token that it sees."""
    a_log_H: Tensor
    """Logarithms of the decay rates of the gates."""
    dt_bias_H: Tensor
    """Biases of the gates."""
    strength: float
    """The upper bound of a strength."""
    conv_bias_C: Tensor | None = None
    """Bias of the convolution; None for none."""
    skip_H: Tensor | None = None
    """Mamba2's weights of each token's own value."""

    def rows(self, at: slice | Tensor) -> DeltaInputs:
        """Return the inputs of some rows."""
        return replace(self, mixed_TC=self.mixed_TC[at], a_TH=self.a_TH[at], b_TH=self.b_TH[at])

    def convolution(self, cache: DeltaStates) -> Convolution:
        """Return the layer's convolution."""
        return Convolution(self.conv_CW, self.conv_bias_C, cache.windows)


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """The states of one layer, in slots."""

    windows: Tensor
    """[slots, C, W] the last inputs of the convolution."""
    states: Tensor
    """[slots, H, K, V] float32. Its memory also holds the pages of update lists, see `views`."""
    spec: DeltaSpec
    """The sizes of the layer."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of keys and values in update lists."""
        return _DTYPES[self.spec.itemsize] if self.windows.dtype != torch.float16 else torch.float16

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates, keys and values of all pages of update lists, N updates per page.

        Gates are [pages, G, N, H/G], keys [pages, G, N, K] and values [pages, G, N, H/G, V]. Page p
        of slot s is page s * spec.pages + p.
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
    """Return the channels at which queries, keys and values begin."""
    keys, values = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
    return (0, keys, 2 * keys) if spec.corrects else (values + keys, values, 0)


_DTYPES: Final = {2: torch.bfloat16, 4: torch.float32}


def page_offsets(spec: DeltaSpec) -> tuple[int, int]:
    """Return the byte offsets of keys and values in a page's part of one key head.

    The gates are at offset 0.
    """
    gates = 4 * spec.page_tokens * (spec.v_heads // spec.k_heads)
    keys = -(-gates // 16) * 16
    return keys, keys + spec.page_tokens * spec.k_dim * spec.itemsize


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The state slots of T rows with one token each."""

    inputs_RT: Tensor
    """int64. If rows have states of their own [2, T]: the slot that a row reads, and the slot that
    it writes. If rows have update lists [4 + P, T]: the slot of the state to which a row's list
    applies, the number of updates in the list, the slots of its window before and after the token,
    and the pages of the list. The token's update is appended to the list."""

    @property
    def has_lists(self) -> bool:
        """Whether rows have update lists."""
        return len(self.inputs_RT) > NUM_OWN

    @property
    def num_rows(self) -> int:
        """T, the number of rows."""
        return self.inputs_RT.shape[1]
