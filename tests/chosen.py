"""Which experts tokens choose in tests."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(tokens: int, each: int, num: int) -> Tensor:
    """Experts of each token. The last but one has nothing to do, and some choose none."""
    chosen_TX = torch.rand(tokens, num + 1).argsort(1)[:, :each]
    return torch.where(chosen_TX == num - 2, num - 1, chosen_TX)
