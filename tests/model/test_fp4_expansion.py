"""Matrices in 4 bits that are expanded into scratch memory for many rows.

The kernels need a GPU, or TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from chosen import choose
from devices import DEVICE, INTERPRETED, needs_compiler, needs_triton
from fp4_matrices import FORMATS, check_products, exact, limit, stored
from tiny_models import save_tiny_model
from torch import Tensor, nn

from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.linear.batch_invariant import BatchInvariantLayers
from treegen.model.linear.experts import group_by_expert
from treegen.model.linear.fp4 import FourBitExperts, Fp4Linear, fp4_product, split_rows
from treegen.model.linear.fp4_checkpoint import replace_with_empty_fp4

KIND = torch.float32 if INTERPRETED else torch.bfloat16


def poisoned(*shape: int, dtype: torch.dtype = KIND) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def on_device(*tensors: Tensor | None) -> list[Any]:
    return [None if each is None else each.to(DEVICE) for each in tensors]


def scales(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Poison scratch memory; returns what is used."""
    from treegen.model.linear import fp4_expansion

    used: list[Tensor] = []

    def new(rows: Tensor, *shape: int) -> Tensor:
        used.append(poisoned(*shape, rows.shape[1], dtype=torch.bfloat16))
        return used[-1]

    monkeypatch.setattr(fp4_expansion, "_scratch", new)
    return used


class TestKernels:
    """On a GPU or in the interpreter."""

    pytestmark = needs_triton

    @pytest.mark.parametrize("kind", FORMATS)
    @pytest.mark.parametrize("shape", [(3, 32), (2, 5, 96), (1, 7, 4224)])
    def test_all_numbers_are_expanded_exactly_into_poisoned_memory(
        self, kind: str, shape: tuple[int, ...]
    ) -> None:
        from treegen.model.linear import fp4_expansion

        torch.manual_seed(0)
        weight, scale, _ = stored(kind, *shape)
        out = poisoned(*shape, dtype=torch.bfloat16)
        fp4_expansion.expand(*[*on_device(weight, scales(scale)), kind == "nvfp4", out])
        want = dequantize_fp4(weight, scale)
        assert torch.equal(out.cpu().float(), split_rows(want.flatten(0, -2)).view(want.shape))

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
    def test_products_of_one_matrix_are_those_of_the_other_kernel(
        self, rows: int, with_bias: bool, scratch: list[Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the bit if sums are exact in float32 in any order."""
        from treegen.model.linear import fp4_expansion, fp4_kernels

        monkeypatch.setattr(fp4_expansion, "_MAX_ROWS_AT_ONCE", 16)
        torch.manual_seed(rows)
        weight, _, factor = stored("nvfp4", 40, 96)
        assert factor is not None
        scale = torch.randint(48, 64, (40, 6), dtype=torch.uint8)  # 2^-1 to 2
        x = torch.randint(-8, 9, (rows, 96)).bfloat16()
        bias = torch.randn(40).bfloat16() if with_bias else None
        given = on_device(split_rows(x), weight, scale, factor, bias)
        got, want = poisoned(rows, 40), poisoned(rows, 40)
        quarters, *matrix = given
        fp4_expansion.fp4_linear(quarters, tuple(matrix), got)
        fp4_kernels.fp4_linear(quarters, tuple(matrix), want)
        assert torch.equal(got, want) and len(scratch) == 1

    @pytest.mark.parametrize("rows", [3, 20])
    def test_products_of_one_matrix_are_those_of_float64(
        self, rows: int, scratch: list[Tensor]
    ) -> None:
        from treegen.model.linear import fp4_expansion

        torch.manual_seed(rows)
        x = (torch.randn(rows, 176) * torch.rand(rows, 1) * 50).bfloat16()
        matrices = stored("nvfp4", 72, 176)
        weight, scale, factor = matrices
        want = x.double() @ exact(matrices).T
        size = x.double().abs() @ exact(matrices).abs().T + 1e-6
        got = poisoned(rows, 72)
        given = on_device(split_rows(x), weight, scales(scale), factor)
        quarters, *matrix = given
        fp4_expansion.fp4_linear(quarters, (*matrix, None), got)
        assert ((got.cpu().double() - want).abs() <= limit(want, size, got.dtype)).all()

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("kind", FORMATS)
    @pytest.mark.parametrize(("tokens", "each"), [(1, 1), (7, 2), (13, 3)])
    def test_products_of_experts_are_those_of_float64(
        self, tokens: int, each: int, kind: str, with_bias: bool, scratch: list[Tensor]
    ) -> None:
        from treegen.model.linear import fp4_expansion

        torch.manual_seed(tokens)
        rows = (torch.randn(tokens, 96) * torch.rand(tokens, 1) * 50).bfloat16()
        matrices = stored(kind, 4, 40, 96)
        weight, scale, factor = matrices
        bias = torch.randn(4, 40).bfloat16() if with_bias else None
        chosen_TX = choose(tokens, each, 4)
        order, blocks = group_by_expert(chosen_TX.to(DEVICE), 4)
        out = poisoned(chosen_TX.numel(), 40)
        given = on_device(split_rows(rows), weight, scales(scale), factor, bias)
        quarters, *of_experts = given
        routes = order, blocks, each
        fp4_expansion.grouped_fp4_product(quarters, tuple(of_experts), routes, out)
        check_products(out, rows, matrices, bias, chosen_TX)
        assert len(scratch) == 1


@pytest.mark.gpu
def test_rows_around_the_threshold_have_equal_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from treegen.model.linear import fp4_expansion

    calls: list[int] = []
    expand = fp4_expansion.expand

    def count(*given: Any) -> None:
        calls.append(1)
        expand(*given)

    monkeypatch.setattr(fp4_expansion, "expand", count)
    weight, _, factor = stored("nvfp4", 520, 640)
    scale = torch.randint(48, 64, (520, 40), dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.randint(-8, 9, (1200, 640)).bfloat16()
    given = on_device(weight, scale, factor)
    first = next(
        n for n in range(1, 1200) if fp4_expansion.is_faster(n, 0, torch.device("cuda", 0))
    )
    quarters = split_rows(x).cuda()
    fused = fp4_product(quarters, *given, None, False)
    assert not calls
    for rows in (1, first - 1, first, first + 1, 1024, 1025, 1200):
        assert torch.equal(fp4_product(quarters[:rows], *given, None, True), fused[:rows]), rows
    assert len(calls) == 5


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_threshold_follows_from_what_the_device_does_per_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from treegen.model.linear import fp4_expansion

    monkeypatch.setattr(fp4_expansion, "_balance", lambda device: 200.0)
    device = torch.device("cpu")
    assert [fp4_expansion.is_faster(n, 0, device) for n in (259, 260)] == [False, True]
    assert [fp4_expansion.is_faster(n, 8, device) for n in (2879, 2880)] == [False, True]
    assert fp4_expansion.scratch_bytes(100, 64, 0) == 2 * 6400 + 4 * 1024 * 100
    assert fp4_expansion.scratch_bytes(100, 64, 8) == 2 * 8 * 6400


def test_reproducible_layers_do_not_expand(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path, "qwen3_moe")
    module: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path)
    replace_with_empty_fp4(module)
    layers = [p for p in module.modules() if isinstance(p, Fp4Linear | FourBitExperts)]
    assert any(isinstance(part, FourBitExperts) for part in layers)
    assert layers and all(part.expands for part in layers)
    fixed = BatchInvariantLayers(module)
    assert not any(part.expands for part in layers)
    fixed.undo()
    assert all(part.expands for part in layers)


@needs_compiler
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_kernel_compiles(kind: str, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear import fp4_expansion

    constants = {"K": 5120, "GROUP": 16 if kind == "nvfp4" else 32, "BLOCK": 1024}
    constants["IS_E4M3"] = kind == "nvfp4"
    types = {"weights": "*u16", "scales": "*u8", "out": "*bf16"}
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
    source = ASTSource(
        fp4_expansion._expand, types | dict.fromkeys(constants, "constexpr"), constants, aligned
    )
    ptx = compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    # Each thread writes 16 bytes of each of the four parts at once.
    assert ptx.count("st.global.v4.b32") >= 4
