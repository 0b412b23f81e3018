"""Gated layers in FP8: silu(gate) * up is computed and rounded in one kernel.

A stock layer writes silu(gate) * up in 16 bits. The compiler rounds it to FP8 in a kernel that
computes each number twice: once for the largest of its row, once to round it.

Legend: M rows, F width of gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from treegen.model.linear.fp8 import LEAST, MOST, Fp8Linear, quantize_rows, scaled_product
from treegen.model.linear.merged import MergedLinear, MergedLinearPart
from treegen.ops.attention.types import FP8


class GatedLinears:
    """The FP8 layers whose input is silu(gate) * up of two merged layers, replaced until `undo`."""

    def __init__(self, module: nn.Module, run: Callable[[], object]) -> None:
        """Find the layers by their inputs in a forward pass.

        Args:
            module: The model.
            run: Runs a forward pass of the model.
        """
        self._parts: list[_Gated] = []
        calls: list[_Call] = []

        def note(part: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            """Record a call; a forward hook.

            Args:
                part: The layer.
                inputs: Its inputs.
                out: Its output.
            """
            calls.append((part, inputs[0], out))

        with ExitStack() as hooks:
            for part in module.modules():
                if isinstance(part, Fp8Linear):
                    hooks.enter_context(part.register_forward_hook(note))
            run()
        for gate, up, down in zip(calls, calls[1:], calls[2:], strict=False):
            if (
                type(down[0]) is Fp8Linear
                and _are_pair(gate[0], up[0])
                and _is_gated(gate, up, down)
            ):
                down[0].__class__ = _Gated
                part = cast(_Gated, down[0])
                part.joint = cast(MergedLinearPart, up[0]).joint
                part.joint.keeps = True
                self._parts.append(part)

    def undo(self) -> None:
        """Make each layer round its own input again."""
        for part in self._parts:
            part.joint.keeps = False
            del part.joint
            cast(nn.Module, part).__class__ = Fp8Linear
        self._parts.clear()


class _Gated(Fp8Linear):
    """An FP8 layer that recomputes its input from the merged product of gate and up."""

    joint: MergedLinear

    def forward(self, input: Tensor) -> Tensor:
        product, self.joint.product = self.joint.product, None
        if product is None:
            return super().forward(input)
        rows, scale_M = silu_mul_quantize(product.reshape(-1, 2 * self.in_features))
        return scaled_product(rows, scale_M, self.weight, self.scale, self.bias, like=input)


def _are_pair(gate: nn.Module, up: nn.Module) -> bool:
    """Return whether two layers are computed together, and no other layer with them."""
    if not (
        isinstance(gate, MergedLinearPart)
        and isinstance(up, MergedLinearPart)
        and gate.joint is up.joint
    ):
        return False
    return len(gate.joint.sizes) == 2 and (gate.place, up.place) == (0, 1)


_Call = tuple[nn.Module, Tensor, Tensor]  # a layer, its input, and its output


def _is_gated(gate: _Call, up: _Call, down: _Call) -> bool:
    """Return whether a layer's input is silu(gate) * up. All-zero numbers do not show this."""
    shapes = gate[2].shape, up[2].shape
    if shapes != (down[1].shape, down[1].shape) or not down[1].any():
        return False
    return torch.equal(silu(gate[2]) * up[2], down[1])


@torch.library.custom_op("treegen::silu_mul_quantize", mutates_args=())
def silu_mul_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up [M, F] in FP8, and the scale of each row [M].

    Args:
        gate_up: Gates and ups [M, 2 F], gates first.
    """
    gate, up = gate_up.chunk(2, -1)
    if gate_up.device.type != "cuda":
        return quantize_rows(silu(gate.float()) * up.float())
    from treegen.model.linear.row_kernels import silu_quantize

    rounded = torch.empty(gate.shape, dtype=FP8, device=gate_up.device)
    scale_M = torch.empty(len(gate_up), dtype=torch.float32, device=gate_up.device)
    silu_quantize(gate_up.contiguous(), rounded, scale_M, MOST, LEAST)
    return rounded, scale_M


@silu_mul_quantize.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape
    rounded = gate_up.new_empty((rows, width // 2), dtype=FP8)
    return rounded, gate_up.new_empty(rows, dtype=torch.float32)
