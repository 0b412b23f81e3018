"""Convolutions of whole runs, on windows in their slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from treegen.model.recurrent.states import StateRun

# C channels, W width of windows, N sequences that run together, L tokens of each


def convolved(
    x_TC: Tensor, conv_C1W: Tensor, bias_C: Tensor | None, windows: Tensor, run: StateRun
) -> Tensor:
    """The convolution's outputs at a run's tokens, [N, L, C]; windows have these afterwards.

    x_TC: of these N * L tokens. conv_C1W: may see fewer tokens than a window has.
    """
    x_NCL = x_TC.view(run.num, run.length, -1).transpose(1, 2)
    width, seen = windows.shape[-1], conv_C1W.shape[-1]
    if run.reads_N is None:
        before = x_NCL.new_zeros(run.num, x_NCL.shape[1], width)
    else:
        before = windows[run.reads_N]
    whole = torch.cat([before, x_NCL], -1)
    windows[run.writes_N] = whole[..., -width:]
    whole = whole[..., width - seen + 1 :].to(conv_C1W.dtype)
    return conv1d(whole, conv_C1W, bias_C, groups=len(conv_C1W)).transpose(1, 2)
