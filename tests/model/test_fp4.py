"""Products of rows by matrices in 4 bits, against float64.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from chosen import choose
from devices import DEVICES, INTERPRETED, needs_compiler
from fp4_matrices import FORMATS, Matrices, check_products, exact, limit, stored
from shared_races import RaceError, Walk, barriers, parse
from torch import Tensor

from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.linear import blocks, experts
from treegen.model.linear.fp4 import (
    fp4_product,
    grouped_fp4_product,
    split_rows,
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


def moved(device: str, *tensors: Tensor | None) -> list[Any]:
    return [None if each is None else each.to(device) for each in tensors]


def grouped(
    rows: Tensor, matrices: Matrices, bias: Tensor | None, chosen_TX: Tensor, device: str
) -> Tensor:
    """Products of pairs; in the interpreter in float32, because it truncates to bfloat16."""
    num, each = len(matrices[0]), chosen_TX.shape[1]
    routes = experts.group_by_expert(chosen_TX.to(device), num)
    given = moved(device, *matrices, bias)
    quarters = split_rows(rows).to(device)
    if not INTERPRETED:
        out: Tensor = grouped_fp4_product(quarters, *given, *routes, each, False)
        return out
    from treegen.model.linear import fp4_kernels

    weight, scale, factor, bias = given
    assert weight is not None and scale is not None
    out = torch.full((chosen_TX.numel(), weight.shape[1]), float("nan"))
    order, parts = routes
    fp4_kernels.grouped_fp4_product(
        quarters, (weight, scale.view(torch.uint8), factor, bias), (order, parts, each), out
    )
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("tokens", "each", "num", "sizes"), SIZES)
def test_products_of_experts_are_those_of_float64(
    tokens: int,
    each: int,
    num: int,
    sizes: tuple[int, int],
    kind: str,
    with_bias: bool,
    device: str,
) -> None:
    if INTERPRETED and tokens * each > 100:
        pytest.skip("the interpreter is slow")
    torch.manual_seed(tokens + each)
    rows = (torch.randn(tokens, sizes[1]) * torch.rand(tokens, 1) * 50).bfloat16()
    matrices = stored(kind, num, *sizes)
    bias = torch.randn(num, sizes[0]).bfloat16() if with_bias else None
    chosen_TX = choose(tokens, each, num)
    got = grouped(rows, matrices, bias, chosen_TX, device)
    assert got.dtype == (torch.float32 if INTERPRETED else torch.bfloat16)
    check_products(got, rows, matrices, bias, chosen_TX)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, (16, 16)), (3, (200, 176)), (0, (16, 32)), (17, (130, 400)), (140, (520, 640))],
)
def test_products_of_one_matrix_are_those_of_float64(
    rows: int, sizes: tuple[int, int], with_bias: bool, device: str
) -> None:
    torch.manual_seed(rows)
    x = (torch.randn(rows, sizes[1]) * torch.rand(rows, 1) * 50).bfloat16()
    matrices = stored("nvfp4", *sizes)
    bias = torch.randn(sizes[0]).bfloat16() if with_bias else None
    want = x.double() @ exact(matrices).T
    size = x.double().abs() @ exact(matrices).abs().T + 1e-6
    if bias is not None:
        want = want + bias.double()
        size = size + want.abs()
    quarters, weight, scale, factor, bias = moved(device, split_rows(x), *matrices, bias)
    if device == "cpu" and not INTERPRETED:
        outs = [fp4_product(quarters, weight, scale, factor, bias, False)]
    else:
        from treegen.model.linear import fp4_kernels

        kind = torch.float32 if INTERPRETED else torch.bfloat16
        outs = []
        for tiles in (None, *TILES):
            outs.append(torch.full((rows, sizes[0]), float("nan"), dtype=kind, device=device))
            scales = scale.view(torch.uint8)
            fp4_kernels.fp4_linear(quarters, (weight, scales, factor, bias), outs[-1], tiles)
    for got in outs:
        assert ((got.cpu().double() - want).abs() <= limit(want, size, got.dtype)).all()


if importlib.util.find_spec("triton") is not None:
    from treegen.model.linear.fp4_kernels import Tiles

    TILES = [
        Tiles(16, parts=2),
        Tiles(16, parts=2, apart=True),
        Tiles(32, 64, 256, warps=4, stages=2, parts=4, apart=True),
        Tiles(128, 256, 64),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
def test_all_bytes_times_all_scales_are_exact(kind: str, device: str) -> None:
    """Rows with a single one give the numbers themselves, as far as bfloat16 has them."""
    group = 32 if kind == "mxfp4" else 16
    weight = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, group // 2)
    weight = torch.cat([weight] * 8, dim=1)[None]  # [1, 256, 4 groups]: 8 scales
    last = 248 if kind == "mxfp4" else 120
    # The interpreter is slow, and has no factors below the least normal number.
    for first in range(8, last, 64) if INTERPRETED else range(0, last, 8):
        scale = torch.arange(first, first + 8, dtype=torch.uint8).expand(1, 256, 8).contiguous()
        factor = None if kind == "mxfp4" else torch.ones(1, 256)
        scale = scale if kind == "mxfp4" else scale.view(torch.float8_e4m3fn)
        rows = torch.eye(8 * group).bfloat16()
        chosen_TX = torch.zeros(len(rows), 1, dtype=torch.int64)
        got = grouped(rows, (weight, scale, factor), None, chosen_TX, device)
        want = dequantize_fp4(weight[0], scale[0]).T
        # The device may take what is below the least normal number for 0.
        tiny = torch.finfo(torch.bfloat16).tiny
        far = (got.cpu().float() - want).abs()
        assert (far <= torch.where(want.abs() < tiny, tiny, 0.0)).all(), first


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_bits_of_a_row_do_not_depend_on_the_others_and_never_change(kind: str) -> None:
    torch.manual_seed(0)
    matrices = stored(kind, 8, 192, 320)
    given = moved("cuda", *matrices)
    rows = torch.randn(2048, 320, device="cuda").bfloat16()
    chosen_TX = torch.rand(2048, 8, device="cuda").argsort(1)[:, :2]

    def product(some: slice) -> Tensor:
        routes = experts.group_by_expert(chosen_TX[some], 8)
        out: Tensor = grouped_fp4_product(split_rows(rows[some]), *given, None, *routes, 2, False)
        return out

    whole = product(slice(None)).view(2048, 2, -1)
    sizes = set()
    for begin, end in ((0, 1), (5, 9), (100, 164), (200, 320), (512, 1024), (0, 2048)):
        sizes.add(blocks.rows_of_block(2 * (end - begin), 8))
        for _ in range(20):
            again = product(slice(begin, end)).view(end - begin, 2, -1)
            assert torch.equal(again, whole[begin:end])
    assert sizes == {16, 32, 64, 128}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 8192), (5120, 1024), (40000, 320)])
def test_bits_of_a_row_do_not_depend_on_the_others_with_one_matrix(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    given = moved("cuda", *stored("nvfp4", *sizes))
    rows = torch.randn(1500, sizes[1], device="cuda").bfloat16()
    whole = fp4_product(split_rows(rows), *given, None, False)
    for begin, end in ((0, 1), (5, 9), (100, 164), (200, 320), (512, 1024), (0, 1500)):
        for _ in range(5):
            again = fp4_product(split_rows(rows[begin:end]), *given, None, False)
            assert torch.equal(again, whole[begin:end])


# --- the compiled kernel, without a GPU ----------------------------------------------------------


@functools.cache
def compiled(kind: str, capability: int, rows: int) -> Any:
    """The kernel, compiled for gpt-oss's experts or a layer of 27B. This needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear import fp4_kernels

    device = divmod(capability, 10)
    if kind == "mxfp4":
        tiles = fp4_kernels.grouped_tiles(rows, device)
        sizes = {"N": 5760, "K": 2880, "EACH": 4, "GROUP": 32}
    else:
        tiles = fp4_kernels.choose_tiles(rows, 5120, device, 132)
        inputs = 17408 if tiles.apart else 2816  # about as many steps
        sizes = {"N": 5120, "K": inputs, "EACH": 1, "GROUP": 16}
    flags = {"IS_E4M3": kind == "nvfp4", "HAS_BIAS": kind == "mxfp4", "ONE": kind == "nvfp4"}
    constants: dict[str, Any] = sizes | flags | fp4_kernels.constants_of(tiles)
    types = {
        "rows": "*bf16",
        "weights": "*u16",
        "scales": "*u8",
        "factors": "*fp32",
        "bias": "*bf16",
        "order": "*i32",
        "blocks": "*i32",
        "out": "*fp32" if tiles.apart else "*bf16",
        "max_blocks": "i32",
        "num_rows": "i32",
    }
    if kind == "nvfp4":
        constants |= {"order": None, "blocks": None}
    names = fp4_kernels._fp4_product.arg_names
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in types}
    for name in ("max_blocks", "num_rows"):
        del aligned[names.index(name),]
    for name in ("order", "blocks") if kind == "nvfp4" else ():
        del aligned[names.index(name),]
    source = ASTSource(
        fp4_kernels._fp4_product,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        aligned,
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@needs_compiler
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [*itertools.product(FORMATS, (16, 32, 64, 128)), ("nvfp4", 2048)],
)
def test_the_kernel_compiles_and_its_threads_do_not_race(
    kind: str, capability: int, rows: int
) -> None:
    done = compiled(kind, capability, rows)
    assert done.metadata.shared <= (227 << 10 if capability == 90 else 99 << 10)
    walk = Walk(done.asm["ptx"])
    walk.run()
    assert walk.num_accesses > 20 * 16  # of each of the 17 steps or more


@needs_compiler
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_barrier_or_wait_that_is_taken_out_of_the_kernel_is_missed(
    kind: str, capability: int
) -> None:
    ptx = compiled(kind, capability, 16).asm["ptx"]
    lines = barriers(ptx)
    found = [line for line in lines if races(ptx, without=line)]
    # Triton also sets some between the products of a step, before copies of the first steps, and
    # before those of scales, where all that was read before has passed another barrier.
    assert len(lines) - len(found) <= 4 and len(found) >= 3, (found, lines)
    waits = [each.line for each in parse(ptx)[0] if each.name.startswith("cp.async.wait_group")]
    assert len(waits) == 2
    assert all(races(ptx, without=line) for line in waits)


def races(ptx: str, without: int) -> bool:
    try:
        Walk(ptx, without).run()
    except RaceError:
        return True
    return False


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_assembly_expands_all_numbers_and_scales_exactly() -> None:
    from treegen.model.linear import fp4_numbers

    number = np.arange(1 << 16, dtype=np.int64)
    other = number[::-1].copy()
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    expected = [values[(number >> 4 * i) & 15] for i in range(4)]
    after = [values[(other >> 4 * i) & 15] for i in range(4)]
    powers = [(0x3F80, 0x4080, fp4_numbers.EXPAND, 1.0, 4.0)]
    scale = np.arange(128, dtype=np.int64)[:127]
    numbers = torch.from_numpy(scale.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    low, high = run_assembly(
        fp4_numbers.EXPAND_E4M3.value, 2, scale | scale << 8 | scale << 16 | scale << 24
    )
    for register in (low, high):
        for half in halves(register):
            assert (bfloat16(half) == numbers * 2.0**119).all()
    for at in (1, 7, 8, 56, 126):
        bits = int(halves(low)[0][at])
        powers.append((bits, bits, fp4_numbers.EXPAND_SCALED, *[numbers[at] / 128] * 2))
    for first, second, code, one, two in powers:
        made = run_assembly(code.value, 4, number | other << 16, np.int64(first | second << 16))
        for register, want, then in zip(made, expected, after, strict=True):
            lower, upper = halves(register)
            assert (bfloat16(lower) == want * one).all() and (bfloat16(upper) == then * two).all()


def halves(register: Any) -> tuple[Any, Any]:
    return register & 0xFFFF, register >> 16 & 0xFFFF


def bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: Any) -> Any:
    """Bits of numbers that bfloat16 has exactly."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.int64)


def run_assembly(code: str, outputs: int, *inputs: Any) -> list[Any]:
    """Run PTX without branches; registers are $0, $1 and so on, outputs first."""
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.int64(int(name, 0))

    for line in code.splitlines():
        match = re.fullmatch(r"\s*([a-z0-9_.]+)\s+(.*);", line)
        if match is None or line.strip().startswith("."):
            continue
        name, names = match[1], [each.strip() for each in match[2].split(",")]
        a, *more = map(value, names[1:])
        if name == "mov.b32":
            result = a
        elif name == "shl.b32":
            result = a << more[0] & 0xFFFFFFFF
        elif name == "shr.b32":
            result = a >> more[0]
        elif name == "and.b32":
            result = a & more[0]
        elif name == "lop3.b32":
            assert more[2] == 0xEA
            result = a & more[0] | more[1]
        elif name == "prmt.b32":
            sources = [a >> 8 * i & 255 for i in range(4)] + [
                more[0] >> 8 * i & 255 for i in range(4)
            ]
            result = sum(sources[int(more[1]) >> 4 * i & 15] << 8 * i for i in range(4))
        else:
            assert name == "fma.rn.bf16x2" and int(more[1]) == 0x80008000, line
            parts = zip(halves(np.asarray(a)), halves(np.asarray(more[0])), strict=True)
            one, two = (rounded(bfloat16(x) * bfloat16(y)) for x, y in parts)
            result = one | two << 16
        registers[names[0]] = result
    return [registers[f"${i}"] for i in range(outputs)]
