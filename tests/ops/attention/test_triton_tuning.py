"""The kernels as compiled for cards that are not here, and what is chosen for their memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import Group, make_case, paged

from treegen.errors import InputError
from treegen.ops.attention.level import HostLevel, to_host

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from treegen.ops.attention.gpu.kernels import attend_units, merge_parts
from treegen.ops.attention.gpu.tuning import choose_tuning, find_max_height, fold_tuning
from treegen.ops.attention.gpu.work_units import HEIGHTS, WorkList, WorkShape, build_work_list

KIB = 1 << 10
CARDS = {"RTX 4090": (89, 99 * KIB), "H200": (90, 227 * KIB)}
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
FLAGS = {
    "HAS_POSITIONS": False,
    "HAS_WINDOW": False,
    "HAS_CAP": False,
    "HAS_SINKS": False,
    "LATENT": False,
}


def compiled(
    kernel: Any, dtype: torch.dtype, constants: Mapping[str, Any], options: Any, capability: int
) -> Any:
    """Compile a kernel for arguments of a step's kinds, aligned as a step's are."""
    types = dict.fromkeys(("q", "k", "v", "dense", "sinks", "out"), NAMES[dtype])
    types |= dict.fromkeys(("parts", "part_lses", "dense_lses", "lses"), "*fp32")
    types |= {"pages": "*i32", "units": "*i32", "positions": "*i64"}
    types |= {"scale": "fp32", "softcap": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = ("q", "k", "v", "parts", "dense", "out", "q_row", "q_head", "k_slot", "k_head")
    hints = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in (*aligned, "v_slot", "v_head")
    }
    source = ASTSource(kernel, signature, dict(constants), hints)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.bfloat16, 256),
        pytest.param(torch.bfloat16, 512, marks=pytest.mark.soak),
        pytest.param(torch.float32, 128, marks=pytest.mark.soak),
    ],
)
def test_units_fit_the_card(card: str, dtype: torch.dtype, width: int) -> None:
    capability, memory = CARDS[card]
    for height, few in [*((height, False) for height in HEIGHTS), (1, True), (HEIGHTS[1], True)]:
        if height > find_max_height(width, dtype, memory):
            continue
        chosen = choose_tuning(height, width, dtype, memory, few=few)
        constants = FLAGS | {
            "H": 32,
            "PER_HEAD": min(height, 4),
            "D": width,
            "V": width,
            "BLOCK_D": width,
            "BLOCK_V": width,
            "PAGE": 64,
            "BLOCK_M": height,
            "FOLD": 1,
            "BLOCK_N": chosen.pop("BLOCK_N"),
            "LAST": height <= HEIGHTS[1],
        }
        assert (
            compiled(attend_units, dtype, constants, chosen, capability).metadata.shared <= memory
        )


@pytest.mark.parametrize(
    ("per_head", "columns", "sides"),
    [(20, 32, 1), pytest.param(64, 32, 2, marks=pytest.mark.soak), (3, 16, 1)],
)
def test_streams_of_latents_fit_hopper(per_head: int, columns: int, sides: int) -> None:
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    language = pytest.importorskip("triton.experimental.gluon.language")
    from treegen.ops.attention.gpu import stream_kernels

    types = dict.fromkeys(("pages", "units"), "*i32") | {"scale": "fp32"}
    types |= {"out": "*bf16", "lses": "*fp32"}
    layout = language.NVMMASharedLayout(128, 16, 2)
    for name, rows in (("latents", 64), ("rotated", 64), ("q", columns), ("q_rotated", columns)):
        width = 64 if name.endswith("rotated") else 512
        types[name] = f"tensordesc<bf16[{rows}, {width}],{layout!r}>"
    constants = {"H": 2 * per_head, "PER_HEAD": per_head, "N": columns, "LAST": True}
    constants |= {"SIDES": sides, "QUERIES": 3 - sides}
    types |= dict.fromkeys(constants, "constexpr")
    kernel = stream_kernels.stream_units
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = runtime.GluonASTSource(kernel, signature, constants, {})
    options = {"num_warps": stream_kernels.WARPS.value}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= CARDS["H200"][1]


def test_the_merge_compiles() -> None:
    constants = {"H": 32, "V": 128, "BLOCK_V": 128, "BLOCK_M": 8, "FOLD": 4, "HAS_SINKS": True}
    for capability, memory in CARDS.values():
        merge = compiled(merge_parts, torch.bfloat16, constants, {"num_warps": 4}, capability)
        assert merge.metadata.shared <= memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512])
def test_what_is_chosen_fits_or_shrinks(dtype: torch.dtype, width: int) -> None:
    heights = []
    for memory in (99 * KIB, 163 * KIB, 227 * KIB, 1 << 30):
        top = find_max_height(width, dtype, memory)
        for height, few in product(HEIGHTS, (False, True)):
            if height <= top:
                chosen = choose_tuning(height, width, dtype, memory, few=few)
                assert chosen["num_stages"] >= 1
                assert chosen["BLOCK_N"] >= (8 if height == 1 else 16)
        heights.append(top)
    assert heights == sorted(heights)
    assert heights[0] >= HEIGHTS[1]


def test_large_blocks_keep_a_second_stage() -> None:
    for memory in (99 * KIB, 163 * KIB, 227 * KIB):
        for width, dtype in product((64, 128, 256), (torch.bfloat16, torch.float16)):
            few = choose_tuning(HEIGHTS[1], width, dtype, memory, few=True)
            assert few["num_stages"] >= 2 or few == choose_tuning(HEIGHTS[1], width, dtype, memory)


def test_too_little_memory_says_so() -> None:
    with pytest.raises(InputError, match="head width of 512 need more shared memory"):
        choose_tuning(128, 512, torch.float32, 99 * KIB)


def test_splits_of_few_rows_need_few_graphs() -> None:
    """Each number of splits is another launch, which another CUDA graph records."""
    shape = WorkShape(1, 8, 4, 64, False)

    def splits_of(keys: int, rows: int = 1) -> int:
        case = make_case([[Group(0, rows, keys)]], [keys] * rows, heads=(4, 1))
        host = [to_host(level) for level in paged(case, torch.float32, 64)[2]]
        work = build_work_list(host, replace(shape, num_rows=rows), rows, 132)
        return max(work.num_parts, 1)

    found = {keys: splits_of(keys) for keys in (1, 255, 256, 511, 512, 1_100, 2_047, 2_048, 9_000)}
    assert list(found.values()) == [1, 1, 2, 2, 4, 8, 8, 16, 16]
    assert splits_of(9_000, rows=33) == 8
    assert splits_of(9_000, rows=34) == 11  # 34 rows of 8 key heads are more than 264 programs


def test_single_rows_are_split_by_their_width() -> None:
    """Programs with small blocks share a multiprocessor; one with blocks of wide heads fills it."""

    def splits_of(rows: int, keys: int, shape: WorkShape) -> tuple[int, int]:
        groups = [[Group(i, i + 1, keys) for i in range(rows)]]
        host = [
            to_host(level)
            for level in paged(make_case(groups, [keys] * rows), torch.float32, 64)[2]
        ]
        work = build_work_list(host, replace(shape, num_rows=rows), rows, 132)
        kind = next((at for at, units in enumerate(work.units) if len(units)), work.last_kind)
        return max(work.num_parts, 1), kind

    narrow, wide = WorkShape(1, 8, 4, 64, False), WorkShape(1, 2, 8, 64, False, is_wide=True)
    assert [splits_of(16, keys, narrow)[0] for keys in (1_100, 2_047, 2_048)] == [1, 1, 2]
    assert [splits_of(8, keys, narrow)[0] for keys in (600, 1_023, 1_024)] == [2, 2, 4]
    assert [splits_of(16, keys, wide)[0] for keys in (400, 1_100, 4_200)] == [2, 4, 4]
    assert [splits_of(32, keys, wide)[0] for keys in (400, 1_100, 2_112)] == [1, 4, 8]
    # A shape of narrow heads leaves nothing in the memo of a level that wide heads read.
    groups = [Group(i, i + 1, 4_200) for i in range(32)]
    case = make_case([groups], [4_200] * 32)
    host = [to_host(level) for level in paged(case, torch.float32, 64)[2]]
    for is_wide, parts in ((False, 2), (True, 4), (False, 2)):
        shape = WorkShape(32, 4, 8, 64, False, is_wide=is_wide)
        assert build_work_list(host, shape, 32, 132).num_parts == parts, is_wide
    # One query head per key head: matrix products for few rows in 16 bits.
    alone = WorkShape(1, 32, 1, 64, False)
    assert [splits_of(rows, 64, alone)[1] for rows in (1, 8, 9)] == [1, 1, 0]
    assert splits_of(1, 64, replace(alone, tunes_few=False))[1] == 0


def test_units_are_no_taller_than_asked() -> None:
    case = make_case([[Group(0, 40, 100)]], [100] * 40)
    host = [to_host(level) for level in paged(case, torch.float32, 4)[2]]
    for top in HEIGHTS[1:]:
        work = build_work_list(host, WorkShape(40, 1, 4, 4, False, max_height=top), 40, 2)
        used = [height for height, units in zip(HEIGHTS, work.units, strict=True) if len(units)]
        assert max(used) <= top
        units = np.concatenate(work.units)
        assert (units[:, 2] - units[:, 1]).max() * 4 <= top


def test_streams_of_latents_fill_the_processors() -> None:
    """Single rows write results if one unit each is enough; else keys are split and merged."""

    def own(rows: int) -> HostLevel:
        row, keys = np.arange(rows), np.full(rows, 1000)
        pages = np.arange(rows * 16).reshape(rows, 16)
        return HostLevel(row, row + 1, pages, keys, 0 * row, causal=False)

    def trunk(rows: int) -> HostLevel:
        zero = np.zeros(1, dtype=np.int64)
        return HostLevel(zero, zero + rows, np.arange(32)[None], zero + 2048, zero, causal=False)

    def plan(levels: list[HostLevel], rows: int) -> WorkList:
        shape = WorkShape(rows, 1, 20, 64, False, 64, 64, streamed=True)
        return build_work_list(levels, shape, rows, processors=132)

    many = plan([own(1024)], 1024)
    assert (many.num_parts, len(many.last), sum(map(len, many.units))) == (0, 1024, 0)
    few = plan([own(64)], 64)
    assert (few.num_parts, len(few.last), [*map(len, few.units)]) == (2, 0, [0, 128, 0, 0])
    both = plan([trunk(1024), own(1024)], 1024)
    assert len(both.last) == 0
    assert (both.units[2][:, 2] - both.units[2][:, 1]).max() == 3
    assert (len(both.units[1]), both.num_parts) == (1024, len(both.units[2]) // 342 + 1)


def test_reproducible_attention_to_converted_keys_has_small_blocks() -> None:
    """In products of fewer than 64 rows, Triton permutes 8-bit keys of larger blocks."""
    for height, width in product((16, 32), (64, 128, 256)):
        common = height, width, torch.bfloat16, 227 * KIB
        assert fold_tuning(*common, few=True, converts=True)["BLOCK_N"] == 16
        assert fold_tuning(*common, converts=True)["BLOCK_N"] == 16
        assert fold_tuning(*common, few=True)["BLOCK_N"] > 16
