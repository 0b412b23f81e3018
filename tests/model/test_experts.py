"""Products of pairs of a token and an expert, against float64 and the stock experts.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen import choose, tiny_experts
from devices import DEVICES, INTERPRETED, needs_compiler
from torch import Tensor

from treegen.model.linear import blocks, experts
from treegen.model.linear.experts import GroupedExperts, GroupedLayers, fused_experts
from treegen.model.linear.fp8 import quantize_rows
from treegen.ops.attention.types import FP8

SIZES = [  # tokens, experts of a token, experts, (outputs, inputs)
    (7, 2, 4, (48, 32)),
    (1, 3, 5, (16, 16)),
    (0, 2, 4, (16, 32)),
    (90, 2, 3, (144, 160)),
    (300, 1, 2, (32, 16)),
    (33, 4, 40, (80, 96)),
]


def route(chosen_TX: Tensor, num: int) -> tuple[Tensor, Tensor]:
    if not INTERPRETED:
        routes: tuple[Tensor, Tensor] = experts.group_by_expert(chosen_TX, num)
        return routes
    from treegen.model.linear.expert_kernels import sort_pairs

    order_S = torch.full((chosen_TX.numel(),), -1, dtype=torch.int32)
    blocks_3B = torch.full((3, chosen_TX.numel() // 16 + num), -7, dtype=torch.int32)
    sort_pairs(chosen_TX, num, order_S, blocks_3B)
    return order_S, blocks_3B


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "each", "num"), [size[:3] for size in SIZES])
def test_pairs_are_sorted_into_blocks(tokens: int, each: int, num: int, device: str) -> None:
    torch.manual_seed(tokens)
    chosen_TX = choose(tokens, each, num)
    order_S, blocks_3B = (each.cpu() for each in route(chosen_TX.to(device), num))
    found: dict[int, list[int]] = {}
    covered = 0
    used = blocks.num_blocks(tokens * each, num)
    for expert, begin, end in blocks_3B[:, :used].T.tolist() if tokens else []:
        if expert < 0:
            continue
        assert begin == covered and 0 < end - begin <= blocks.rows_of_block(tokens * each, num)
        covered = end
        found.setdefault(expert, []).extend(order_S[begin:end].tolist())
    want = {
        e: (chosen_TX.reshape(-1) == e).nonzero()[:, 0].tolist()
        for e in range(num)
        if (chosen_TX == e).any()
    }
    assert {e: sorted(pairs) for e, pairs in found.items()} == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["float32", "half", "transposed", "bias", "fp8"])
@pytest.mark.parametrize(("tokens", "each", "num", "sizes"), SIZES)
def test_products_are_those_of_float64(
    tokens: int, each: int, num: int, sizes: tuple[int, int], kind: str, device: str
) -> None:
    torch.manual_seed(tokens + each)
    # Triton's interpreter multiplies no bfloat16.
    half = torch.float16 if INTERPRETED else torch.bfloat16
    dtype = torch.float32 if kind == "float32" else half
    rows = (torch.randn(tokens, sizes[1]) * torch.rand(tokens, 1) * 50).to(device)
    weight = torch.randn(num, *sizes, device=device)
    scale_M = scale_EN = bias = None
    if kind == "fp8":
        rows, scale_M = quantize_rows(rows)
        weight, scale_R = quantize_rows(weight.flatten(0, 1))
        weight, scale_EN = weight.view(num, *sizes), scale_R.view(num, -1)
    else:
        rows, weight = rows.to(dtype), weight.to(dtype)
    if kind == "bias":
        bias = torch.randn(num, sizes[0], device=device).to(dtype)
    chosen_TX = choose(tokens, each, num)
    stored = weight.transpose(1, 2).contiguous() if kind == "transposed" else weight
    routes = route(chosen_TX.to(device), num)
    given = (rows, scale_M, stored, scale_EN, bias, *routes, each, kind == "transposed")
    if INTERPRETED:
        from treegen.model.linear.expert_kernels import grouped_product as kernel

        got = torch.full((tokens * each, sizes[0]), torch.nan)
        kernel(*given, got)
    else:
        got = experts.grouped_product(*given, torch.float32)
    a = rows.cpu().double().repeat_interleave(each, 0)
    live_S = chosen_TX.reshape(-1) < num
    at_S = chosen_TX.reshape(-1).clamp(max=num - 1)
    b = weight.cpu().double()[at_S]
    if scale_M is not None and scale_EN is not None:
        a = a * scale_M.cpu().double().repeat_interleave(each)[:, None]
        b = b * scale_EN.cpu().double()[at_S][..., None]
    want = torch.einsum("sk,snk->sn", a, b)
    scale = torch.einsum("sk,snk->sn", a.abs(), b.abs()) + 1e-6
    if bias is not None:
        want = want + bias.cpu().double()[at_S]
        scale = scale + bias.cpu().double()[at_S].abs()
    limit = 1e-2 if kind == "fp8" and device == "cuda" else 2e-6
    assert ((got.cpu().double() - want).abs() <= limit * scale)[live_S].all()


@pytest.mark.parametrize("device", DEVICES)
def test_weighted_sums_leave_out_pairs_without_an_expert(device: str) -> None:
    torch.manual_seed(0)
    chosen_TX, pairs_SD = choose(9, 3, 5), torch.randn(27, 40)
    pairs_SD[chosen_TX.reshape(-1) >= 5] = torch.nan
    weights_TX = torch.rand(9, 3)
    given = (pairs_SD.to(device), chosen_TX.to(device), weights_TX.to(device), 5)
    if INTERPRETED:
        from treegen.model.linear.expert_kernels import weighted_sum as kernel

        got = torch.full((9, 40), torch.nan)
        kernel(*given, got)
    else:
        got = experts.weighted_sum(*given)
    want = (pairs_SD.double().view(9, 3, 40) * weights_TX.double()[..., None]).nan_to_num().sum(1)
    assert (chosen_TX >= 5).any()
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)


def experts_of(family: str, **settings: Any) -> tuple[Any, Any]:
    model = tiny_experts(family, **settings)
    ((_, found),) = fused_experts(model)
    return model, found.module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("gpt_oss", {}),
        ("nemotron_h", {"layers_block_type": ["moe"]}),
    ],
)
def test_experts_compute_what_the_stock_class_does(
    family: str, settings: dict[str, Any], device: str
) -> None:
    model, part = experts_of(family, **settings)
    model.to(device)
    kind = type(part)
    x, weights_TX = torch.randn(19, 48, device=device), torch.rand(19, 2, device=device)
    chosen_TX = torch.stack([torch.randperm(6)[:2] for _ in range(19)]).to(device)
    want = part(x, chosen_TX, weights_TX)
    grouped = GroupedLayers(model)
    assert isinstance(part, GroupedExperts)
    got = part(x, chosen_TX, weights_TX)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    grouped.undo()
    assert type(part) is kind
    torch.testing.assert_close(part(x, chosen_TX, weights_TX), want)


def test_the_compiler_takes_them_whole() -> None:
    model, part = experts_of("gpt_oss")
    GroupedLayers(model)
    traced: Any = torch.compile(part, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x, weights_TX = torch.randn(tokens, 48), torch.rand(tokens, 2)
        chosen_TX = torch.randint(0, 6, (tokens, 2))
        torch.testing.assert_close(traced(x, chosen_TX, weights_TX), part(x, chosen_TX, weights_TX))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 192, 320, device="cuda").to(dtype)
    rows = torch.randn(2048, 320, device="cuda")
    scale_M = torch.rand(2048, device="cuda") if dtype == FP8 else None
    scale_EN = torch.rand(8, 192, device="cuda") if dtype == FP8 else None
    rows = rows.to(dtype)
    chosen_TX = torch.rand(2048, 8, device="cuda").argsort(1)[:, :2]

    def product(some: slice) -> Tensor:
        scales = None if scale_M is None else scale_M[some]
        routes = experts.group_by_expert(chosen_TX[some], 8)
        out: Tensor = experts.grouped_product(
            rows[some], scales, weight, scale_EN, None, *routes, 2, False, torch.bfloat16
        )
        return out

    whole = product(slice(None)).view(2048, 2, -1)
    sizes = set()
    for begin, end in ((0, 1), (5, 9), (100, 164), (512, 1024), (0, 2048)):
        sizes.add(blocks.rows_of_block(2 * (end - begin), 8))
        assert torch.equal(product(slice(begin, end)).view(end - begin, 2, -1), whole[begin:end])
    assert sizes == {16, 32, 128}


@needs_compiler
@pytest.mark.parametrize(
    ("capability", "kind", "rows", "warps"),
    [(89, "fp8e4nv", 128, 8), (90, "fp8e4nv", 64, 4), (90, "bf16", 64, 4)],
)
def test_the_kernel_compiles(capability: int, kind: str, rows: int, warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear.expert_kernels import _grouped_product

    constants = {
        "N": 1024,
        "K": 2048,
        "EACH": 8,
        "STRIDE_N": 2048,
        "STRIDE_K": 1,
        "HAS_SCALES": kind != "bf16",
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "ROWS": rows,
        "BLOCK_N": 128,
        "BLOCK_K": 64 if kind == "bf16" else 128,
    }
    types = {
        "rows": f"*{kind}",
        "row_scales": "*fp32",
        "weights": f"*{kind}",
        "weight_scales": "*fp32",
        "bias": "*bf16",
        "order": "*i32",
        "blocks": "*i32",
        "out": "*bf16",
        "max_blocks": "i32",
    }
    source = ASTSource(_grouped_product, types | dict.fromkeys(constants, "constexpr"), constants)
    target = GPUTarget("cuda", capability, 32)
    done = compile(source, target=target, options={"num_warps": warps, "num_stages": 3})
    assert done.metadata.shared <= (227 << 10 if capability == 90 else 99 << 10)
