"""Fused experts in FP8, against the same rounded numbers in float64.

Their products: see test_experts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import tiny_experts
from devices import DEVICES
from tiny_models import save_tiny_model
from torch import Tensor
from torch.nn.functional import gelu, silu

from treegen.model.linear.fp8 import disable_input_rounding, quantize_rows
from treegen.model.linear.fp8_experts import (
    Fp8Experts,
    quantize_matrices,
    rounding_experts,
)
from treegen.model.load import load_model
from treegen.ops.attention.types import FP8


def wide(rounded: Tensor, scale: Tensor) -> Tensor:
    return rounded.cpu().double() * scale.cpu().double()[..., None]


def experts_of(family: str, **settings: Any) -> Any:
    model = tiny_experts(family, min_dims=3, **settings)
    ((_, found),) = rounding_experts(model)
    return model, found.module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("nemotron_h", {"layers_block_type": ["moe"]}),
    ],
)
def test_experts_compute_with_rounded_numbers(
    family: str, settings: dict[str, Any], device: str
) -> None:
    model, part = experts_of(family, **settings)
    model.to(device)
    x = torch.randn(9, 48, device=device)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(9)]).to(device)
    weights = torch.rand(9, 2, device=device)
    stock = part(x, chosen, weights)
    quantize_matrices(model, torch.device(device))
    assert isinstance(part, Fp8Experts)
    got = part(x, chosen, weights).cpu().double()
    up, down = (
        wide(getattr(part, name), getattr(part, f"{name}_scale"))
        for name in (part.treegen_up, part.treegen_down)
    )
    want = torch.zeros(9, 48, dtype=torch.float64)
    for t in range(9):
        for expert, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            inner = up[expert] @ wide(*quantize_rows(x[t : t + 1]))[0]
            if family == "nemotron_h":
                inner = inner.relu().square()
            else:
                gate, other = inner.chunk(2)
                inner = (gelu(gate) if settings else silu(gate)) * other
            want[t] += weight * (down[expert] @ wide(*quantize_rows(inner.float()[None]))[0])
    # A number may be rounded to its other neighbour, for it was computed in other steps.
    assert (got - want).norm() <= 0.02 * want.norm()
    assert (got - stock.cpu().double()).norm() <= 0.1 * want.norm()
    with disable_input_rounding(model):
        exact = part(x, chosen, weights).cpu().double()
    assert (exact - stock.cpu().double()).norm() < (got - stock.cpu().double()).norm()
    assert part.gate_up_proj.dtype == FP8 if part.has_gate else part.up_proj.dtype == FP8


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "qwen3_5_moe"])
def test_families_run_with_experts_in_fp8(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    model = load_model(str(tmp_path), quantization="fp8", device="cpu")  # and is checked
    kinds = [part for part in model.module.modules() if isinstance(part, Fp8Experts)]
    assert kinds and not [*rounding_experts(model.module)]


def test_experts_with_biases_stay_as_they_are(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss")
    model = load_model(str(tmp_path), quantization="fp8", device="cpu")
    assert not any(isinstance(part, Fp8Experts) for part in model.module.modules())
