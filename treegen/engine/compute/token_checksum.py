"""A check that all ranks of a model draw the same tokens; cheap enough to be always on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from treegen.common.device import AsyncHostCopy
from treegen.errors import WorkerError

if TYPE_CHECKING:
    from treegen.model.parallel.ranks import Ranks

STEPS: Final = 64
"""Decode steps between two comparisons."""
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no bit of an earlier step is lost


class TokenChecksum:
    """A checksum of all drawn tokens, which is kept and compared on the device.

    The comparison is asynchronous. Its result is read at the next comparison.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Set up the checksum before any token is drawn."""
        self._ranks = ranks
        self._sum = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        self._found: AsyncHostCopy | None = None

    def update(self, tokens: Tensor) -> None:
        """Add the tokens of a step to the sum."""
        self._sum.mul_(_FACTOR).add_(tokens.sum())

    def compare_ranks(self) -> None:
        """Compare with the other ranks, which must all call this, and restart from zero.

        Raises:
            WorkerError: at the previous comparison, ranks had drawn different tokens.
        """
        before, self._found = self._found, AsyncHostCopy([self._ranks.all_gather(self._sum)])
        self._sum = torch.zeros_like(self._sum)
        if before is not None:
            (sums,) = before.wait()
            if (sums != sums[0]).any():
                raise WorkerError(
                    "the ranks of a tensor-parallel model have drawn different tokens, so samples "
                    "of the last steps may be wrong; check the GPUs (dmesg, nvidia-smi -q), and "
                    "make a new LLM to go on"
                )
