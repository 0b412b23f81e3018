"""Fused experts in FP8: rows and matrices are rounded, matrices with a scale for each output.

Legend: T tokens, X experts of a token, E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from treegen.model.linear.experts import (
    FusedExperts,
    GroupedExperts,
    Routes,
    convert_experts,
    fused_experts,
    grouped_product,
)
from treegen.model.linear.fp8 import MULTIPLE, quantize_in_chunks, quantize_linears, quantize_rows
from treegen.model.linear.merged import silu_mul_quantize


class Fp8Experts(GroupedExperts):
    """Experts in FP8. The buffer NAME_scale has the scales [E, N] of tensor NAME."""

    treegen_silu: bool
    """Whether the gate is silu(first half) * second half."""
    rounds_inputs = True
    """Whether inputs are rounded to FP8 too."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts compute from it.

        Args:
            hidden_states: Inputs [T, D].
            top_k_index: The experts of each token [T, X].
            top_k_weights: Their weights [T, X].

        Returns:
            Outputs [T, D].
        """
        if self.rounds_inputs:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return self._forward_dequantized(hidden_states, top_k_index, top_k_weights)

    def _product(self, name: str, rows: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
        is_gate_up = self.treegen_silu and name == self.treegen_down
        quantized = silu_mul_quantize(rows) if is_gate_up else quantize_rows(rows)
        weight, scale_EN = getattr(self, name), getattr(self, f"{name}_scale")
        out: Tensor = grouped_product(*quantized, weight, scale_EN, None, *routes, False, dtype)
        return out

    def _act(self, up: Tensor) -> Tensor:
        # silu(gate) * up is computed where it is rounded.
        return up if self.treegen_silu else super()._act(up)

    def _forward_dequantized(self, hidden: Tensor, *routes: Tensor) -> Tensor:
        """Return what the stock class computes from inputs that are not rounded."""
        parts = {name: self._parameters[name] for name in (self.treegen_up, self.treegen_down)}
        try:
            for name, part in parts.items():
                scale_EN = getattr(self, f"{name}_scale")
                wide = (cast(Tensor, part).float() * scale_EN[..., None]).to(hidden.dtype)
                self._parameters[name] = nn.Parameter(wide, requires_grad=False)
            return cast(Tensor, super(GroupedExperts, self).forward(hidden, *routes))
        finally:
            self._parameters.update(parts)


def rounding_experts(module: nn.Module) -> Iterator[tuple[str, FusedExperts]]:
    """Yield the name and fused experts of each part of a module that may run in FP8.

    Excluded are experts with biases, transposed ones, and those with sizes that are not multiples
    of 16.
    """
    for name, experts in fused_experts(module):
        part = experts.module
        weights = [part._parameters[tensor_name] for tensor_name in experts.tensors]
        is_unaligned = any(size % MULTIPLE for weight in weights for size in weight.shape[1:])
        if not (
            part.has_bias or part.is_transposed or is_unaligned or isinstance(part, Fp8Experts)
        ):
            yield name, experts


def quantize_matrices(module: nn.Module, device: torch.device) -> None:
    """Turn linear layers and fused experts of a module into FP8 on a device."""
    quantize_linears(module, device)
    for _, experts in [*rounding_experts(module)]:
        sides = []
        for name in experts.tensors:
            weight = getattr(experts.module, name).data
            rounded, scale_R = quantize_in_chunks(weight.flatten(0, 1), device)
            sides.append((rounded.view(weight.shape), scale_R.view(weight.shape[:2])))
        install_experts(experts, *sides)


def install_experts(
    experts: FusedExperts, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> None:
    """Turn experts into `Fp8Experts`.

    Args:
        experts: The experts, whose module is changed.
        up: The first FP8 tensor [E, N, K] and its scales, float32 [E, N].
        down: The second FP8 tensor and its scales, likewise.
    """
    part = experts.module
    is_silu = _has_silu(part, experts)
    for name, (weight, scale_EN) in zip(experts.tensors, (up, down), strict=True):
        setattr(part, name, nn.Parameter(weight, requires_grad=False))
        part.register_buffer(f"{name}_scale", scale_EN, persistent=False)
    convert_experts(experts, Fp8Experts)
    part.treegen_silu = is_silu


def _has_silu(part: Any, experts: FusedExperts) -> bool:
    """Return whether experts gate by silu(first half) * second half, tested on sample numbers."""
    if not part.has_gate:
        return False
    weight = getattr(part, experts.up)
    x = torch.linspace(-20, 20, 2 * weight.shape[1], device=weight.device).view(2, -1)
    first, second = x.chunk(2, dim=-1)
    return torch.equal(part._apply_gate(x), silu(first) * second)
