"""Inputs of gated FP8 layers, computed in one go, against the plain way."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from devices import DEVICES
from torch import nn
from torch.nn.functional import gelu, relu, silu

from treegen.model.linear.fp8 import Fp8Linear, quantize_linears, quantize_rows
from treegen.model.linear.merged import GatedLinears, MergedLinears, silu_mul_quantize

Activation = Callable[..., torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, wide: int, activation: Activation) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide), nn.Linear(width, wide)
        self.down, self.activation = nn.Linear(wide, width), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.down(self.activation(self.gate(x)) * self.up(x))
        return total


class Stack(nn.Module):
    def __init__(self, activation: Activation = silu, wide: int = 48) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = [Block(32, wide, activation) for _ in range(3)]
        self.layers = nn.ModuleList(self.blocks)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got.float() - want.float()).norm() <= 0.03 * want.float().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 16), (7, 48), (33, 1040), (5, 14336)])
def test_rows_are_activated_and_rounded(
    rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(rows + width)
    gate_up = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
    gate_up[rows // 2 :: 3] = 0  # rows of zeros
    rounded, scales = silu_mul_quantize(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    want, want_scales = quantize_rows(silu(gate) * up)
    assert rounded.dtype == want.dtype and rounded.shape == want.shape
    torch.testing.assert_close(scales, want_scales, rtol=1e-5, atol=0)
    # A number on the edge between two of FP8 may go either way.
    assert (
        rounded.view(torch.uint8) != want.view(torch.uint8)
    ).float().sum() <= 1e-3 * want.numel()
    torch.testing.assert_close(rounded.float(), want.float(), rtol=0.13, atol=0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_gated_layers_are_found_and_give_the_same(compiled: bool, device: str) -> None:
    stack = Stack().to(device)
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2)).to(device)
    quantize_linears(stack, x.device)
    want = stack(x)
    merged = MergedLinears(stack, lambda: stack(x[:1]))
    gated = GatedLinears(stack, lambda: stack(x[:1]))
    downs = [block.down for block in stack.blocks]
    assert all(type(down) is not Fp8Linear for down in downs)
    call = torch.compile(stack, backend="aot_eager", fullgraph=True) if compiled else stack
    for _ in range(2):
        assert close(call(x), want)
    assert all(cast(Any, down).merged.product is None for down in downs)
    gated.undo()
    assert all(type(down) is Fp8Linear for down in downs)
    merged.undo()
    assert stack(x).equal(want)


def test_other_layers_stay_as_they_are() -> None:
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    cases: list[tuple[Activation, torch.Tensor]] = [
        (gelu, x),
        (relu, x),
        (silu, torch.zeros(2, 32)),
    ]
    for activation, given in cases:
        stack = Stack(activation)
        for block in stack.blocks:
            nn.init.zeros_(block.gate.bias)
            nn.init.zeros_(block.down.bias)
        quantize_linears(stack, x.device)
        MergedLinears(stack, partial(stack, given))
        GatedLinears(stack, partial(stack, given))
        assert all(type(block.down) is Fp8Linear for block in stack.blocks)
