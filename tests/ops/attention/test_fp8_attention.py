"""Attention to keys and values that are stored in FP8, and the kernel that writes them.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/ops/attention/test_fp8_attention.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import (
    Group,
    check_attention,
    make_case,
    oracle,
    paged,
    random_tree,
    to_device,
)
from devices import CUDA, needs_triton
from torch import Tensor

from treegen.errors import InputError
from treegen.ops.attention import attend, prepare
from treegen.ops.attention.registry import check_reads_fp8
from treegen.ops.attention.types import FP8

IMPLS = [
    "reference",
    "cpu",
    pytest.param("triton", marks=[needs_triton, *([pytest.mark.gpu] if CUDA else [])]),
    pytest.param("invariant", marks=[needs_triton, *([pytest.mark.gpu] if CUDA else [])]),
]


def rounded(numbers: Tensor) -> Tensor:
    return numbers.float().clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(6))
def test_attention_takes_the_numbers_that_are_stored(impl: str, seed: int) -> None:
    by_triton = impl in ("triton", "invariant")
    device = "cuda" if by_triton and CUDA else "cpu"
    case = make_case(**random_tree(seed, max_depth=5), seed=seed, round_to=FP8)
    options: dict[str, Any] = {"window": 9, "softcap": 3.0} if seed % 3 == 2 else {}
    kind = torch.float16 if seed % 2 and by_triton else torch.float32
    bound = 2**-9 if kind == torch.float16 else 2e-4 if impl == "invariant" else 2e-5
    check_attention(case, kind, impl, (bound, 1e-3), device=device, stored=FP8, **options)


@pytest.mark.parametrize("impl", ["xformers", "flash", "flash4"])
def test_other_implementations_refuse_it(impl: str) -> None:
    with pytest.raises(InputError, match=f"{impl}.*does not support an FP8 KV cache"):
        check_reads_fp8(impl)


def test_keys_and_values_must_both_be_in_fp8() -> None:
    case = make_case(**random_tree(0, max_depth=3), seed=0, round_to=FP8)
    keys, values, levels = paged(case, FP8)
    with pytest.raises(InputError, match=r"values .* must be torch.float8_e4m3fn"):
        attend(case.q.float(), keys, values.float(), levels, case.positions)


@needs_triton
def test_the_kernel_writes_the_same() -> None:
    if CUDA:
        pytest.skip("tested on the GPU above")
    from treegen.ops.attention.gpu.kernels import write_slots

    # The interpreter rounds wrongly what is close below a power of two, so nothing is to round.
    generator = torch.Generator().manual_seed(0)
    k, v = (rounded(torch.randn(3, 2, 8, generator=generator) * 9).float() for _ in range(2))
    k[0, 0, :2] = torch.tensor([1e9, -500.0])
    pools = [torch.zeros(4, 2, 8).to(FP8) for _ in range(2)]
    slots = torch.tensor([2, 0, 3])
    write_slots[(3,)](
        k,
        v,
        *pools,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *pools[0].stride()[:2],
        *pools[1].stride()[:2],
        G=2,
        K=8,
        V=8,
        BLOCK_G=2,
        BLOCK_K=8,
        BLOCK_V=8,
        MAX_VALUE=448.0,
    )
    for pool, new in zip(pools, (k, v), strict=True):
        assert torch.equal(pool[slots].float(), rounded(new).float())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_trunk_is_still_for_cudnn(dtype: torch.dtype) -> None:
    rows, trunk = 512, 2048  # less is not for cuDNN
    groups = [[Group(0, rows, trunk)], [Group(i, i + 1, 5, trunk) for i in range(rows)]]
    case = make_case(groups, [trunk + 5] * rows, dims=(64, 64), heads=(8, 2), round_to=FP8)
    want_out, want_lse = oracle(case)
    keys, values, levels = paged(case, FP8, 64, shuffle=False)
    on_device = [to_device(level, "cuda") for level in levels]
    prepared = prepare(on_device, case.positions.cuda(), "triton")
    out, lse = attend(
        case.q.to("cuda", dtype), keys.cuda(), values.cuda(), prepared, return_lse=True
    )
    if torch.cuda.get_device_capability()[0] >= 9:
        assert prepared.kernels == ("cudnn", "triton")
    bound = 2**-6 if dtype == torch.bfloat16 else 2**-8
    torch.testing.assert_close(out.cpu().double(), want_out, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-3)
