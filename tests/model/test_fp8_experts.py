"""Fused experts in FP8, against the same rounded numbers in float64.

The kernel runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import AutoConfig, AutoModelForCausalLM

from treegen.attention.types import FP8
from treegen.model.linear.fp8 import quantized, smooth
from treegen.model.linear.fp8_experts import (
    Fp8Experts,
    fused_experts,
    grouped_product,
    quantize_matrices,
)
from treegen.model.load import load_model

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not CUDA
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU")]),
]


def wide(rounded: Tensor, scale: Tensor) -> Tensor:
    return rounded.cpu().double() * scale.cpu().double()[..., None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "each", "experts", "sizes"),
    [
        (7, 2, 4, (48, 32)),
        (1, 3, 5, (16, 16)),
        (0, 2, 4, (16, 32)),
        (90, 2, 3, (144, 160)),
        (300, 1, 2, (32, 16)),
    ],
)
def test_products_are_those_of_rounded_numbers(
    tokens: int, each: int, experts: int, sizes: tuple[int, int], device: str
) -> None:
    torch.manual_seed(tokens + each)
    spread = torch.rand(tokens, 1) * 50
    rows, scale_M = quantized((torch.randn(tokens, sizes[1]) * spread).to(device))
    weight, scale_R = quantized(torch.randn(experts * sizes[0], sizes[1]).to(device))
    weight, scale_EN = weight.view(experts, *sizes), scale_R.view(experts, -1)
    # The last expert but one has nothing to do.
    chosen = torch.randint(0, experts, (tokens * each,))
    chosen[chosen == experts - 2] = experts - 1
    sorted_S, order_S = chosen.sort(stable=True)
    ends_E = torch.searchsorted(sorted_S, torch.arange(experts), right=True, out_int32=True)
    given = (rows, scale_M, weight, scale_EN, order_S.to(device), ends_E.to(device), each)
    if INTERPRETED:
        from treegen.model.linear.fp8_kernels import grouped_product as kernel

        got = torch.full((tokens * each, sizes[0]), torch.nan)
        kernel(*given, got)
    else:
        got = grouped_product(*given, torch.float32)
    a = wide(rows, scale_M).repeat_interleave(each, 0)
    b = wide(weight, scale_EN)[chosen]
    want = torch.einsum("sk,snk->sn", a, b)
    scale = torch.einsum("sk,snk->sn", a.abs(), b.abs()) + 1e-6
    limit = 1e-2 if device == "cuda" else 2e-6
    assert ((got.cpu().double() - want).abs() <= limit * scale).all()


def experts_of(family: str, **settings: Any) -> Any:
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=6, num_experts_per_tok=2,
        n_routed_experts=6, intermediate_size=32, moe_intermediate_size=32, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 2:
            weight.normal_()
    ((_, found),) = fused_experts(model)
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
            inner = up[expert] @ wide(*quantized(x[t : t + 1]))[0]
            if family == "nemotron_h":
                inner = inner.relu().square()
            else:
                gate, other = inner.chunk(2)
                inner = (gelu(gate) if settings else silu(gate)) * other
            want[t] += weight * (down[expert] @ wide(*quantized(inner.float()[None]))[0])
    # A number may be rounded to its other neighbour, for it was computed in other steps.
    assert (got - want).norm() <= 0.02 * want.norm()
    assert (got - stock.cpu().double()).norm() <= 0.1 * want.norm()
    with smooth(model):
        exact = part(x, chosen, weights).cpu().double()
    assert (exact - stock.cpu().double()).norm() < (got - stock.cpu().double()).norm()
    assert part.gate_up_proj.dtype == FP8 if part.has_gate else part.up_proj.dtype == FP8


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "qwen3_5_moe"])
def test_families_run_with_experts_in_fp8(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    model = load_model(str(tmp_path), quantization="fp8", device="cpu")  # and is checked
    kinds = [part for part in model.module.modules() if isinstance(part, Fp8Experts)]
    assert kinds and not [*fused_experts(model.module)]


def test_experts_with_biases_stay_as_they_are(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss")
    model = load_model(str(tmp_path), quantization="fp8", device="cpu")
    assert not any(isinstance(part, Fp8Experts) for part in model.module.modules())


def test_the_compiler_takes_them_whole() -> None:
    model, part = experts_of("qwen3_moe")
    quantize_matrices(model, torch.device("cpu"))
    traced: Any = torch.compile(part, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x, weights = torch.randn(tokens, 48), torch.rand(tokens, 2)
        chosen = torch.randint(0, 6, (tokens, 2))
        torch.testing.assert_close(traced(x, chosen, weights), part(x, chosen, weights))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
@pytest.mark.parametrize(("capability", "block", "warps"), [(89, 128, 8), (90, 64, 4)])
def test_the_kernel_compiles(capability: int, block: int, warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear.fp8_kernels import _grouped_product

    constants = {
        "E": 256, "N": 1024, "K": 2048, "EACH": 8, "BLOCK_E": 256, "BLOCK_M": block,
        "BLOCK_N": 128, "BLOCK_K": 128,
    }  # fmt: skip
    types = {
        "rows": "*fp8e4nv", "row_scales": "*fp32", "weights": "*fp8e4nv", "weight_scales": "*fp32",
        "order": "*i64", "ends": "*i32", "out": "*bf16", "num_pairs": "i32",
    }  # fmt: skip
    source = ASTSource(_grouped_product, types | dict.fromkeys(constants, "constexpr"), constants)
    target = GPUTarget("cuda", capability, 32)
    done = compile(source, target=target, options={"num_warps": warps, "num_stages": 3})
    assert done.metadata.shared <= (227 << 10 if capability == 90 else 99 << 10)
