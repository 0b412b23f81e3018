"""Attention replaced by zeros: what a decode step takes without it. No attention can beat that.

Keys and values are still written, and levels are still prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from treegen.bench.decoding.modes import NO_ATTENTION
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.registry import LOADERS, choose, register
from treegen.ops.attention.types import AttentionOptions, KVPair, PreparedLevels


class NoAttention:
    """An implementation that computes nothing; it is chosen only by name."""

    name = NO_ATTENTION
    in_graphs = True

    def refusal(self, device: torch.device) -> str | None:
        """Runs everywhere."""
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare what the device's own implementation does, so that steps still become graphs."""
        return choose("auto", device).prepare(levels, positions_T, device)

    def attend(
        self,
        q_THD: Tensor,
        pairs: Sequence[KVPair],
        prepared: PreparedLevels,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Zeros."""
        shape = q_THD.shape[:2]
        v_dim = pairs[0][1].shape[-1]
        return q_THD.new_zeros(*shape, v_dim), q_THD.new_zeros(shape, dtype=torch.float32)


@contextmanager
def no_attention() -> Iterator[str]:
    """While open, the implementation can be chosen by the name that this yields."""
    register(NO_ATTENTION, NoAttention, auto=False)
    try:
        yield NO_ATTENTION
    finally:
        del LOADERS[NO_ATTENTION]
