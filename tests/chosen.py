"""What tests of experts share: devices, and which experts tokens choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU")]),
]


def choose(tokens: int, each: int, num: int) -> Tensor:
    """Experts of each token. The last but one has nothing to do, and some choose none."""
    chosen_TX = torch.rand(tokens, num + 1).argsort(1)[:, :each]
    return torch.where(chosen_TX == num - 2, num - 1, chosen_TX)
