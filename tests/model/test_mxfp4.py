"""Products of rows by experts in MXFP4, against float64. The kernel runs on a GPU alone."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import pytest
import torch
from chosen import CUDA, DEVICES, choose
from shared_races import RaceError, Walk, barriers, parse
from torch import Tensor

from treegen.model.linear import blocks, experts
from treegen.model.linear.mxfp4 import dequantize_mxfp4, mxfp4_product

NEEDS_COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
SIZES = [  # tokens, experts of a token, experts, (outputs, inputs)
    (7, 2, 4, (48, 32)),
    (1, 3, 5, (16, 64)),
    (0, 2, 4, (16, 32)),
    (90, 2, 3, (144, 160)),
    (300, 1, 2, (32, 320)),
    (33, 4, 40, (200, 96)),
    (500, 4, 16, (130, 288)),
]


def halves_of(rows: Tensor) -> Tensor:
    return torch.stack([rows[:, 0::2], rows[:, 1::2]], dim=1)


def stored(*shape: int, scales: tuple[int, int] = (120, 130)) -> tuple[Tensor, Tensor]:
    """Bytes and scales of random matrices [E, N, K]."""
    outer, inputs = shape[:-1], shape[-1]
    weight = torch.randint(0, 256, (*outer, inputs // 2), dtype=torch.uint8)
    return weight, torch.randint(*scales, (*outer, inputs // 32), dtype=torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "each", "num", "sizes"), SIZES)
def test_products_are_those_of_float64(
    tokens: int, each: int, num: int, sizes: tuple[int, int], with_bias: bool, device: str
) -> None:
    torch.manual_seed(tokens + each)
    rows = (torch.randn(tokens, sizes[1]) * torch.rand(tokens, 1) * 50).bfloat16()
    weight, scale = stored(num, *sizes)
    bias = torch.randn(num, sizes[0]).bfloat16() if with_bias else None
    chosen_TX = choose(tokens, each, num)
    routes = experts.group_by_expert(chosen_TX.to(device), num)
    given = (each.to(device) if each is not None else None for each in (weight, scale, bias))
    got = mxfp4_product(halves_of(rows).to(device), *given, *routes, each)
    assert got.dtype == torch.bfloat16
    live_S = chosen_TX.reshape(-1) < num
    at_S = chosen_TX.reshape(-1).clamp(max=num - 1)
    a = rows.double().repeat_interleave(each, 0)
    b = torch.stack([dequantize_mxfp4(*pair) for pair in zip(weight, scale, strict=True)]).double()[
        at_S
    ]
    want = torch.einsum("sk,snk->sn", a, b)
    size = torch.einsum("sk,snk->sn", a.abs(), b.abs()) + 1e-6
    if bias is not None:
        want = want + bias.double()[at_S]
    # What is left is the rounding to 8 bits, beside that of sums in float32.
    limit = 2e-6 * size + 2**-8 * want.abs()
    assert ((got.cpu().double() - want).abs() <= limit)[live_S].all()


@pytest.mark.parametrize("device", DEVICES)
def test_all_bytes_times_all_scales_are_exact(device: str) -> None:
    """Rows with a single one give the numbers themselves, as far as bfloat16 has them."""
    weight = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    weight = torch.cat([weight] * 8, dim=1)[None]  # [1, 256, 128]: 256 inputs, of 8 scales
    for first in range(0, 248, 8):
        scale = torch.arange(first, first + 8, dtype=torch.uint8).expand(1, 256, 8).contiguous()
        rows = torch.eye(256).bfloat16()
        routes = experts.group_by_expert(torch.zeros(256, 1, dtype=torch.int64, device=device), 1)
        got = mxfp4_product(
            halves_of(rows).to(device), weight.to(device), scale.to(device), None, *routes, 1
        )
        want = dequantize_mxfp4(weight[0], scale[0]).T
        # The device may take what is below the least normal number for 0.
        tiny = torch.finfo(torch.bfloat16).tiny
        far = (got.cpu().float() - want).abs()
        assert (far <= torch.where(want.abs() < tiny, tiny, 0.0)).all(), first


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_bits_of_a_row_do_not_depend_on_the_others_and_never_change() -> None:
    torch.manual_seed(0)
    weight, scale = (each.cuda() for each in stored(8, 192, 320))
    halves = halves_of(torch.randn(2048, 320, device="cuda").bfloat16())
    chosen_TX = torch.rand(2048, 8, device="cuda").argsort(1)[:, :2]

    def product(some: slice) -> Tensor:
        routes = experts.group_by_expert(chosen_TX[some], 8)
        out: Tensor = mxfp4_product(halves[some], weight, scale, None, *routes, 2)
        return out

    whole = product(slice(None)).view(2048, 2, -1)
    sizes = set()
    for begin, end in ((0, 1), (5, 9), (100, 164), (200, 320), (512, 1024), (0, 2048)):
        sizes.add(blocks.rows_of_block(2 * (end - begin), 8))
        for _ in range(20):
            again = product(slice(begin, end)).view(end - begin, 2, -1)
            assert torch.equal(again, whole[begin:end])
    assert sizes == {16, 32, 64, 128}


@functools.cache
def compiled(capability: int, rows: int) -> Any:
    """The kernel, compiled for gpt-oss's matrices. This needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear import mxfp4_kernels

    constants = {
        "N": 5760,
        "K": 2880,
        "EACH": 4,
        "HAS_BIAS": True,
        "ROWS": rows,
        "BLOCK_N": mxfp4_kernels.BLOCK_N,
        "BLOCK_K": mxfp4_kernels.BLOCK_K,
    }
    types = {
        "halves": "*bf16",
        "weights": "*u8",
        "scales": "*u8",
        "bias": "*bf16",
        "order": "*i32",
        "blocks": "*i32",
        "out": "*bf16",
        "room": "i32",
    }
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(7)}
    source = ASTSource(
        mxfp4_kernels._mxfp4_product,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        aligned,
    )
    stages = mxfp4_kernels.choose_num_stages(rows, divmod(capability, 10))
    options = {"num_warps": 8, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@NEEDS_COMPILER
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("capability", [89, 90])
def test_the_kernel_compiles_and_its_threads_do_not_race(capability: int, rows: int) -> None:
    done = compiled(capability, rows)
    assert done.metadata.shared <= (227 << 10 if capability == 90 else 99 << 10)
    walk = Walk(done.asm["ptx"])
    walk.run()
    assert walk.num_accesses > 20 * 22  # of each of the 23 steps


@NEEDS_COMPILER
@pytest.mark.parametrize("capability", [89, 90])
def test_a_barrier_or_wait_that_is_taken_out_of_the_kernel_is_missed(capability: int) -> None:
    ptx = compiled(capability, 16).asm["ptx"]
    lines = barriers(ptx)
    found = [line for line in lines if races(ptx, without=line)]
    # Triton also sets one before copies of the first steps, and one before those of scales in a
    # loop, where all that was read before has passed another barrier.
    assert len(lines) - len(found) <= 2 and len(found) >= 5, (found, lines)
    waits = [each.line for each in parse(ptx)[0] if each.name.startswith("cp.async.wait_group")]
    assert len(waits) == 2
    assert all(races(ptx, without=line) for line in waits)


def races(ptx: str, without: int) -> bool:
    try:
        Walk(ptx, without).run()
    except RaceError:
        return True
    return False
