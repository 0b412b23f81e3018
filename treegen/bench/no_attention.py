"""Attention replaced by zeros: the time of a decode step without it, which no attention can beat.

Keys and values are still written, and levels are still prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from treegen.bench.workloads import NO_ATTENTION
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.registry import LOADERS, choose, register
from treegen.ops.attention.types import AttentionOptions, KVPair, PreparedLevels


class _NoAttention:
    """An implementation that computes nothing; it is chosen only by name."""

    name = NO_ATTENTION
    in_graphs = True

    def refusal(self, device: torch.device) -> str | None:
        """Return None: it runs on every device."""
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare levels as the default implementation does, so that graphs can be used.

        Args:
            levels: The levels of the pass.
            positions_T: Position of each query row, `[T]`; needed if a level is causal.
            device: The device of the pass.
        """
        return choose("auto", device).prepare(levels, positions_T, device)

    def attend(
        self,
        q_THD: Tensor,
        pairs: Sequence[KVPair],
        prepared: PreparedLevels,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sum-exps of zeros.

        Args:
            q_THD: Queries, `[T, H, D]`.
            pairs: Keys and values of the cache; the width of a value is that of the output.
            prepared: Ignored.
            options: Ignored.
        """
        shape = q_THD.shape[:2]
        v_dim = pairs[0][1].shape[-1]
        return q_THD.new_zeros(*shape, v_dim), q_THD.new_zeros(shape, dtype=torch.float32)


@contextmanager
def no_attention() -> Iterator[str]:
    """Register the implementation while the context is open, and yield its name."""
    register(NO_ATTENTION, _NoAttention, auto=False)
    try:
        yield NO_ATTENTION
    finally:
        del LOADERS[NO_ATTENTION]
