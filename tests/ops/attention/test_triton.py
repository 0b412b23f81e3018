"""The Triton implementation against the oracle: on a GPU, or in Triton's interpreter on a CPU.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/ops/attention/test_triton.py`; the
interpreter must be chosen before Triton is imported, and it computes bf16 products wrongly, so
float16 stands in.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    MIXED,
    RAGGED,
    Case,
    Group,
    check_attention,
    make_case,
    oracle,
    paged,
    random_tree,
    to_device,
)
from devices import CUDA, DEVICE, needs_triton
from torch import Tensor

import treegen.ops.attention.gpu.attend as attend_module
import treegen.ops.attention.gpu.state as state_module
from treegen.common.device import StagingBuffer
from treegen.errors import InputError
from treegen.ops.attention import Level, attend, prepare
from treegen.ops.attention.gpu import dense
from treegen.ops.attention.gpu.dense import find_run
from treegen.ops.attention.gpu.state import StaticState
from treegen.ops.attention.gpu.tuning import choose_tuning
from treegen.ops.attention.gpu.work_units import (
    HEIGHTS,
    KEY_BLOCK,
    KEYS_PER_SPLIT_FEW,
    WorkShape,
    build_work_list,
)
from treegen.ops.attention.level import HostLevel, to_host
from treegen.ops.sampling.draw import uniforms

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def check(case: Case, dtype: torch.dtype, *, page_size: int = 4, **options: Any) -> None:
    # 16-bit inputs are exact in the case, so only the products' rounding is left.
    bounds = TOLERANCE[dtype], 1e-4
    check_attention(case, dtype, "triton", bounds, page_size=page_size, **options)


@needs_triton
@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_trees(seed: int) -> None:
    check(make_case(**random_tree(seed, max_depth=[3, 12][seed % 2]), seed=seed), torch.float32)


@needs_triton
@pytest.mark.parametrize("seed", range(12))
def test_window_cap_and_sinks(seed: int) -> None:
    case = make_case(**random_tree(seed + 50, max_depth=4), seed=seed)
    options: dict[str, Any] = {["window", "chunk"][seed // 6]: [2, 7, 30][seed % 3]}
    if seed % 2:
        options |= {"softcap": 3.0, "sinks": torch.randn(4)}
    check(case, torch.float32, scale=0.3, **options)


@needs_triton
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (96, 96), (129, 64), (256, 256)])
def test_heads_and_dimensions(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float16
    for kind in (torch.float32, dtype):
        case = make_case(RAGGED, [60] * 9, heads=heads, dims=dims, round_to=kind)
        check(case, kind, page_size=16)


@needs_triton
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (192, 128), (512, 512)])
def test_tall_units_of_wide_heads(dims: tuple[int, int]) -> None:
    """What one program keeps is bounded by the card: the widest heads take shorter units."""
    groups = [[Group(0, 70, 150)], [Group(i, i + 1, 1 + i % 20, 150) for i in range(70)]]
    dtype = torch.bfloat16 if CUDA else torch.float16
    for kind in (torch.float32, dtype):
        case = make_case(groups, [180] * 70, heads=(4, 1), dims=dims, round_to=kind)
        check(case, kind, page_size=64)


@needs_triton
def test_chunked_causal_prefill_beside_decode() -> None:
    """A chunk that continues an earlier one, a fresh span and a decoding row under one prefix."""
    check(make_case(*MIXED, causal=[False, True]), torch.float32)
    check(make_case(*MIXED, causal=[False, True]), torch.float32, window=9)


@needs_triton
def test_few_rows_on_long_keys_are_split() -> None:
    groups = [[Group(0, 3, 4 * KEYS_PER_SPLIT_FEW + 5)], [Group(1, 2, 3, 2000)]]
    case = make_case(groups, [3000] * 3, heads=(2, 2))
    check(case, torch.float32, page_size=16)
    check(case, torch.float32, page_size=16, window=2500)


@needs_triton
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (8, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(32, 32), (256, 256)])
def test_few_single_rows(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """In 16 bits they have a tuning of their own, which uses matrix products for one head too."""
    dtype = torch.bfloat16 if CUDA else torch.float16
    flat = [[Group(0, 1, 2100), Group(1, 2, 40)]]
    cascaded = [[Group(0, 2, 300)], [Group(0, 1, 70, 300), Group(1, 2, 5, 300)]]
    for groups in (flat, cascaded):
        case = make_case(groups, [2200] * 2, heads=heads, dims=dims, round_to=dtype)
        check(case, dtype, page_size=16)
        check(case, dtype, page_size=16, window=1900, softcap=4.0, sinks=torch.randn(heads[0]))


@needs_triton
@pytest.mark.parametrize(("heads", "width"), [((20, 20), 32), ((8, 8), 256)])
def test_graphs_have_the_tuning_of_eager_steps(
    heads: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare capacity of a graph's lists of units does not make few programs many."""
    for module in (attend_module, state_module):
        monkeypatch.setattr(module, "count_processors", lambda _: 132)
    chosen: list[bool] = []

    def choose(*args: Any, few: bool) -> dict[str, Any]:
        chosen.append(few)
        return choose_tuning(*args, few=few)

    monkeypatch.setattr(attend_module, "choose_tuning", choose)
    dtype = torch.bfloat16 if CUDA else torch.float16
    case = make_case([[Group(0, 1, 700)]], [800], heads=heads, dims=(width, width), round_to=dtype)
    keys, values, levels = paged(case, dtype, 16)
    prepared = prepare([to_device(level, DEVICE) for level in levels], impl="triton")
    graph = StaticState(prepared.state.levels, torch.device(DEVICE))
    for given in (prepared, replace(prepared, state=graph)):
        q, pool = case.q.to(DEVICE, dtype), (keys.to(DEVICE), values.to(DEVICE))
        attend(q, *pool, given)
    assert chosen == [True, True]


@needs_triton
def test_many_groups_of_one_row() -> None:
    rng = np.random.default_rng(3)
    rows = 1000 if CUDA else 60
    groups = [[Group(i, i + 1, int(rng.integers(1, 40))) for i in range(rows)]]
    check(make_case(groups, [99] * rows, heads=(4, 2)), torch.float32)


@needs_triton
def test_many_rows_on_one_prefix() -> None:
    groups = [[Group(0, 300, 70)], [Group(0, 280, 9, 70), Group(280, 300, 3, 70)]]
    check(make_case(groups, [90] * 300, heads=(8, 2), dims=(32, 32)), torch.float32, page_size=16)


@needs_triton
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_one_row_alone(heads: tuple[int, int]) -> None:
    check(make_case([[Group(0, 1, 70)]], [99], heads=heads), torch.float32, page_size=16)
    check(make_case([[Group(0, 1, 7)], [Group(0, 1, 9, 7)]], [15], heads=heads), torch.float32)


@needs_triton
def test_nothing_to_attend_to() -> None:
    check(make_case([[Group(0, 2, 0)], [Group(1, 2, 3)]], [5, 5, 5]), torch.float32)


@needs_triton
def test_what_it_does_not_take_is_refused() -> None:
    case = make_case([[Group(0, 2, 3)]], [5, 5])
    keys, values, levels = paged(case, torch.float64)
    if CUDA:
        return
    with pytest.raises(InputError, match="does not support float64; use 'reference'"):
        attend(case.q, keys, values, levels, impl="triton")
    with pytest.raises(InputError, match="requires the same keys and values for all levels"):
        two = [keys.float(), keys.float()], [values.float(), values.float()]
        attend(case.q.float(), *two, [*levels, *levels], impl="triton")


@pytest.mark.parametrize("seed", range(20))
def test_the_work_list_covers_every_row_and_key_once(seed: int) -> None:
    """Each (row, key) of each group is in exactly one unit, each unit within its height."""
    case = make_case(**random_tree(seed), seed=seed)
    _, _, levels = paged(case, torch.float32)
    host = [to_host(level) for level in levels]
    for per_head, processors in ((1, 1), (2, 64), (7, 500), (32, 8)):
        rows = len(case.positions)
        work = build_work_list(host, WorkShape(rows, 2, per_head, 4, False), rows, processors)
        seen: dict[tuple[int, int], int] = {}
        lists = [*zip(work.units, HEIGHTS, strict=True), (work.last, HEIGHTS[work.last_kind])]
        if len(work.last):
            assert (work.last[:, 1:3] == np.arange(len(case.positions))[:, None] + [0, 1]).all()
        for units, height in lists:
            for part, start, stop, table, low, high, origin, _, page in units.tolist():
                assert (stop - start) * per_head <= max(height, per_head)
                assert low % KEY_BLOCK == 0
                assert 0 <= part < work.num_parts or units is work.last
                assert low >= high or page == work.pages[table + low // 4]
                for row in range(start, stop):
                    for key in range(low, high):
                        page = int(work.pages[table + key // 4])
                        place = (row, page * 4 + key % 4)
                        assert place not in seen
                        seen[place] = origin + key
        want = {
            (row, int(level.pages_GP[g, key // 4]) * 4 + key % 4): int(level.kv_start_G[g]) + key
            for level in host
            for g in range(level.start_G.size)
            for row in range(level.start_G[g], level.stop_G[g])
            for key in range(level.kv_len_G[g])
        }
        assert seen == want


@needs_triton
@pytest.mark.parametrize(
    ("heads", "merges", "is_half"),
    [((4, 4), True, False), ((4, 2), True, True), ((4, 2), False, False), ((4, 2), False, True)],
)
def test_what_a_graph_was_captured_with_serves_other_steps(
    heads: tuple[int, int], merges: bool, is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows, other lengths; and one part less, or rows that a level leaves out, if there was
    room for that when it was captured. Parts that nobody has written hold NaN.

    Args:
        merges: Rows have keys of their own, whose launch merges. Otherwise a kernel of its own
            does.
        is_half: 16 bits, in which few rows have a tuning of their own.
    """
    dtype, tolerance = torch.float32, 1e-4
    if is_half:
        dtype, tolerance = torch.bfloat16 if CUDA else torch.float16, 2e-2 if CUDA else 4e-3
        for module in (attend_module, state_module):
            monkeypatch.setattr(module, "count_processors", lambda _: 132)
    new_empty, size = torch.Tensor.new_empty, 16

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = new_empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

    def made(rows: int, middle: tuple[int, ...], longest: int) -> tuple[Case, list[Level], Any]:
        """Rows below a root, and below what groups with these stops have."""
        starts = zip((0, *middle), middle, strict=False)
        groups = [
            [Group(0, rows, longest)],
            [Group(start, stop, 9 + stop, longest) for start, stop in starts],
            [Group(i, i + 1, 1 + i % 5, longest + 30) for i in range(rows) if merges],
        ]
        present = [level for level in groups if level]
        case = make_case(present, [longest + 60] * rows, heads=heads, round_to=dtype)
        keys, values, levels = paged(case, dtype, 4)
        return (
            case,
            [to_device(level, DEVICE) for level in levels],
            (keys.to(DEVICE), values.to(DEVICE)),
        )

    def run(state: StaticState, case: Case, levels: list[Level], pool: Any) -> None:
        q = torch.zeros(size, *case.q.shape[1:], dtype=dtype, device=DEVICE)
        q[: len(case.q)] = case.q
        prepared = replace(prepare(levels, impl="triton"), state=state)
        sinks = torch.randn(4)
        got = attend(q, pool[0], pool[1], prepared, sinks=sinks.to(DEVICE), return_lse=True)
        assert got[0].isfinite().all()
        for tensor, want in zip(got, oracle(case, sinks=sinks), strict=True):
            live = tensor[: len(case.q)].cpu().double()
            torch.testing.assert_close(live, want, rtol=tolerance, atol=tolerance)

    whole, fewer = made(13, (6, 13), 21), made(9, (7, 9), 40)
    short, partial = made(11, (), 30), made(12, (5,), 17)
    for first, fits, refused in (
        (whole, (fewer, short, whole), (partial,)),
        (partial, (whole, partial, short, fewer), ()),
        (short, (short,), (whole, partial)),
    ):
        state = StaticState(prepare(first[1], impl="triton").state.levels, torch.device(DEVICE))
        run(state, *first)
        for case, levels, pool in fits:
            assert state.load(prepare(levels, impl="triton").state, StagingBuffer())
            run(state, case, levels, pool)
        for _, levels, _ in refused:
            assert (
                not state.load(prepare(levels, impl="triton").state, StagingBuffer()) or not merges
            )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (8, 8), (8, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(64, 16_400), (70, 8_200), (300, 2_053), (1_024, 530)])
def test_a_long_trunk_is_left_to_the_dense_kernel(
    heads: tuple[int, int], rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into chunks where rows are few; heads become rows where they fill tiles badly."""
    monkeypatch.setattr(dense, "_MIN_WORK", 1)
    groups = [
        [Group(0, rows, keys)],
        [Group(0, rows // 2, 40, keys), Group(rows // 2, rows - 1, 3, keys)],
        [Group(i, i + 1, 1 + i % 5, keys + 40) for i in range(rows)],
    ]
    dims = (64, 64) if rows == 300 else (128, 128)
    case = make_case(
        groups, [keys + 60] * rows, heads=heads, dims=dims, round_to=torch.bfloat16, seed=rows
    )
    for depth in (1, 2, 3):
        part = replace(
            case,
            groups=groups[:depth],
            keys=case.keys[:depth],
            values=case.values[:depth],
            causal=case.causal[:depth],
        )
        keys_of, values_of, levels = paged(part, torch.bfloat16, 64, shuffle=False)
        moved = [to_device(level, DEVICE) for level in levels]
        prepared = prepare(moved, part.positions.to(DEVICE), impl="triton")
        sinks = torch.randn(heads[0]) if depth == 3 else None
        out, lse = attend(
            part.q.to(DEVICE, torch.bfloat16),
            keys_of.to(DEVICE),
            values_of.to(DEVICE),
            prepared,
            sinks=None if sinks is None else sinks.to(DEVICE),
            return_lse=True,
        )
        want_out, want_lse = oracle(part, sinks=sinks)
        assert prepared.kernels[0] == "cudnn"
        bound = TOLERANCE[torch.bfloat16]
        torch.testing.assert_close(out.cpu().double(), want_out, rtol=bound, atol=bound)
        torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [((8, 2), 128), ((8, 8), 64), ((4, 1), 96)])
def test_a_prefill_pass_below_a_long_trunk(
    heads: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trunk, less what is no multiple of 512, goes to cuDNN; new tokens see their past."""
    monkeypatch.setattr(dense, "_PASS_MIN_WORK", 1)
    trunk, stops = 2_600, [200, 203, 700]
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    groups = [
        [Group(0, 700, trunk)],
        [Group(start, stop, stop - start, trunk) for start, stop in spans],
    ]
    case = make_case(
        groups,
        [trunk + i for start, stop in spans for i in range(stop - start)],
        heads=heads,
        dims=(width, width),
        causal=[False, True],
        round_to=torch.bfloat16,
    )
    keys, values, levels = paged(case, torch.bfloat16, 64, shuffle=False)
    moved = [to_device(level, DEVICE) for level in levels]
    prepared = prepare(moved, case.positions.to(DEVICE), impl="triton")
    out, lse = attend(
        case.q.to(DEVICE, torch.bfloat16),
        keys.to(DEVICE),
        values.to(DEVICE),
        prepared,
        return_lse=True,
    )
    want_out, want_lse = oracle(case)
    assert prepared.kernels == ("cudnn", "triton")
    bound = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out.cpu().double(), want_out, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-4, atol=1e-4)


def _dense_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What cuDNN computes, with its shapes: LSEs have a last dimension of one."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * scale
    return (logits.softmax(-1) @ v).to(q.dtype), logits.logsumexp(-1).float()[..., None]


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="for the interpreter"
)


@pytest.fixture
def slow_dense(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A slow kernel in cuDNN's place, which takes anything."""
    from treegen.ops.attention.gpu import attend as triton

    monkeypatch.setattr(dense, "_attend", _dense_kernel)
    monkeypatch.setattr(triton, "can_attend_dense", lambda *_: True)
    return monkeypatch


@interpreted
@pytest.mark.parametrize("seed", range(16))
def test_what_the_dense_kernel_leaves_is_merged_with_it(
    seed: int, slow_dense: pytest.MonkeyPatch
) -> None:
    """Chunks, folded heads, padded rows and keys left over."""
    from treegen.ops.attention.gpu import state as triton_state

    rng = np.random.default_rng(seed)
    for name, value in (
        ("_MIN_KEYS", 24),
        ("_MIN_WORK", 1),
        ("_CHUNK", int(rng.choice([64, 128]))),
    ):
        slow_dense.setattr(dense, name, value)
    processors = int(rng.choice([2, 40]))
    slow_dense.setattr(triton_state, "count_processors", lambda _: processors)
    rows, trunk = int(rng.choice([1, 7, 70])), int(rng.integers(24, 400))
    groups = [
        [Group(0, rows, trunk)],
        [Group(0, -(-rows // 2), 21, trunk)],
        [Group(i, i + 1, 1 + i % 5, trunk + 30) for i in range(rows)],
    ][: 1 + seed % 3]
    heads = [(4, 4), (4, 2), (6, 2)][int(rng.integers(3))]
    case = make_case(groups, [trunk + 60] * rows, heads=heads, seed=seed)
    page = int(rng.choice([4, 16, 64]))
    options: dict[str, Any] = {"sinks": torch.randn(heads[0])} if seed % 2 else {}
    want_out, want_lse = oracle(case, **options)
    keys, values, levels = paged(case, torch.float32, page, shuffle=False)
    prepared = prepare(levels, case.positions, impl="triton")
    out, lse = attend(case.q.float(), keys, values, prepared, return_lse=True, **options)
    assert prepared.kernels[0] == "cudnn"
    torch.testing.assert_close(out.double(), want_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("seed", range(8))
def test_a_pass_leaves_what_all_its_rows_read_to_the_dense_kernel(
    seed: int, slow_dense: pytest.MonkeyPatch
) -> None:
    """A trunk above spans of new tokens, each of which sees itself up to its own position."""
    rng = np.random.default_rng(seed)
    for name, value in (("_MIN_KEYS", 16), ("_PASS_MIN_WORK", 1), ("_PASS_ALIGN", 16)):
        slow_dense.setattr(dense, name, value)
    trunk, lengths = int(rng.integers(16, 100)), rng.integers(1, 40, int(rng.integers(1, 4)))
    stops = lengths.cumsum().tolist()
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    groups = [
        [Group(0, stops[-1], trunk)],
        [Group(start, stop, stop - start, trunk) for start, stop in spans],
    ]
    positions = [trunk + i for start, stop in spans for i in range(stop - start)]
    case = make_case(groups, positions, causal=[False, True], seed=seed)
    keys, values, levels = paged(case, torch.float32, 16, shuffle=False)
    prepared = prepare(levels, case.positions, impl="triton")
    options: dict[str, Any] = {"sinks": torch.randn(case.q.shape[1])} if seed % 2 else {}
    got = attend(case.q.float(), keys, values, prepared, return_lse=True, **options)
    assert prepared.kernels == ("cudnn", "triton")
    for tensor, want in zip(got, oracle(case, **options), strict=True):
        torch.testing.assert_close(tensor.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(30))
def test_runs_for_the_dense_kernel_are_what_all_rows_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "_PASS_MIN_WORK", 2**22)
    rng = np.random.default_rng(seed)
    rows, page = int(rng.integers(1, 2000)), int(rng.choice([16, 64]))
    levels, used = [], 0
    for whole in rng.permutation([True, True, False]):
        keys = int(rng.integers(1, 20_000))
        pages = np.arange(-(-keys // page)) + used
        used += len(pages)
        if rng.random() < 0.3:
            rng.shuffle(pages)
        stop = rows if whole else int(rng.integers(0, rows))
        zero = np.array([0])
        levels.append(HostLevel(zero, zero + stop, pages[None], zero + keys, zero, causal=False))
    padded = rows + int(rng.integers(0, 64))
    kv_heads, per_head = int(rng.choice([1, 8])), int(rng.choice([1, 4]))
    is_pass = seed % 3 == 2
    if is_pass:
        one = np.array([0])
        levels.append(HostLevel(one, one + rows, np.array([[used]]), one + 9, one, causal=True))
    shape = WorkShape(padded, kv_heads, per_head, page, True)
    run = find_run(levels, shape, rows, processors=132)
    if run is None:  # where pages are shuffled, or there is too little to do
        long = [
            np.diff(level.pages_GP[0]).max(initial=1) == 1
            and level.stop_G[0] == rows
            and not level.causal
            and level.kv_len_G[0] >= 1024
            for level in levels
        ]
        assert not any(long) or rows * kv_heads * per_head < 2**13
        return
    level = levels[run.level]
    assert level.stop_G[0] == rows
    assert not level.causal
    assert padded <= run.rows < padded + (512 if is_pass else 64)
    assert run.rows % (512 if is_pass else 64) == 0
    assert run.fold in (1, per_head)
    assert 512 <= run.num_keys <= level.kv_len_G[0]
    assert run.num_chunks == 1 or (run.chunk_keys % KEY_BLOCK == 0 and run.chunk_keys >= 960)
    left = level.kv_len_G[0] - run.num_keys - (511 if is_pass else 0)
    assert left < KEY_BLOCK * run.num_chunks + run.num_chunks
    want = run.first_page + np.arange(-(-run.num_keys // page))
    assert (level.pages_GP[0, : len(want)] == want).all()


def test_without_a_gpu_the_cpu_is_chosen() -> None:
    case = make_case([[Group(0, 2, 3)]], [5, 5])
    _, _, levels = paged(case, torch.float32)
    assert prepare(levels).impl == "cpu"
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(InputError, match="triton"):
            prepare(levels, impl="triton")


@needs_triton
def test_the_kernel_draws_the_same_uniform_numbers() -> None:
    from treegen.ops.sampling.kernels import draw_blocks

    rows = 300 if CUDA else 40
    seeds = torch.randint(0, 2**62, (rows,)) * 2 + torch.arange(rows) % 2
    steps = torch.randint(0, 1000, (rows,))
    # Equal weights, whose sums are exact: the token says which part of [0, 1) the number is in.
    logits, temperature = torch.zeros(rows, 2**16, device=DEVICE), torch.ones(rows, device=DEVICE)
    tokens, _, _ = draw_blocks(
        logits, seeds.to(DEVICE)[:, None], steps.to(DEVICE)[:, None], temperature, None
    )
    assert tokens[:, 0].cpu().equal((uniforms(seeds, steps).float() * 2**16).long())


def seed_of(uniform: Tensor, step: Tensor) -> Tensor:
    """A seed from which that number in [0, 1) comes at that step: SplitMix64 backwards."""
    seeds = []
    for number, at in zip(uniform.tolist(), step.tolist(), strict=True):
        z = int(number * 2**53) << 11
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            z ^= z >> shift ^ z >> 2 * shift
            z = z * pow(factor, -1, 2**64) % 2**64
        z = (z - (at + 1) * 0x9E3779B97F4A7C15) % 2**64
        seeds.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(seeds)


@needs_triton
@pytest.mark.parametrize("size", [5, 4096, 10_000])
def test_block_draws_follow_the_cumulative_distribution(size: int) -> None:
    """Each drawn token's interval of the CDF holds the row's uniform, up to float32 sums."""
    from treegen.ops.sampling.kernels import draw_blocks

    rows = 200 if CUDA else 40
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=generator) * 4
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    steps = torch.arange(rows)
    seeds = seed_of(uniform, steps)
    torch.testing.assert_close(uniforms(seeds, steps), uniform, rtol=0, atol=2**-53)
    temperature = torch.rand(rows, generator=generator) + 0.3
    greedy = torch.arange(rows) % 5 == 4
    tokens, logprobs, lse = (
        tensor.cpu()
        for tensor in draw_blocks(
            *(t.to(DEVICE) for t in (logits, seeds[:, None], steps[:, None], temperature, greedy))
        )
    )
    tokens, logprobs = tokens[:, 0], logprobs[:, 0]
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    want = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=1e-5, atol=1e-5)
    assert tokens[greedy].equal(logits.argmax(-1)[greedy])
    p = (logits.double() / temperature[:, None].double()).softmax(-1)
    assert (p.gather(1, tokens[:, None]) > 0).all()
    after = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    before = after - p.gather(1, tokens[:, None])[:, 0]
    drawn = ~greedy
    assert (uniform >= before - 1e-5)[drawn].all()
    assert (uniform <= after + 1e-5)[drawn].all()
    logits[3, 1] = torch.nan
    logits[4] = torch.nan
    assert greedy[4]
    tokens, _, lse = draw_blocks(
        *(t.to(DEVICE) for t in (logits, seeds[:, None], steps[:, None], temperature, greedy))
    )
    assert lse.isfinite().sum() == rows - 2
    assert 0 <= tokens.min() <= tokens.max() < size


@needs_triton
def test_several_draws_of_a_row_are_those_of_one_each() -> None:
    """A prompt's first tokens are drawn together, or one by one where a run is resumed."""
    from treegen.ops.sampling.kernels import draw_blocks

    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 9000, generator=generator) * 4).to(DEVICE)
    seeds = torch.randint(0, 2**62, (5, 7), generator=generator).to(DEVICE)
    steps, temperature = torch.zeros_like(seeds), torch.full((5,), 0.8, device=DEVICE)
    together = draw_blocks(logits, seeds, steps, temperature, None)
    assert len(together[0].unique()) > 5
    for at in range(7):
        one = draw_blocks(
            logits, seeds[:, at : at + 1].contiguous(), steps[:, :1].contiguous(), temperature, None
        )
        assert one[0][:, 0].equal(together[0][:, at])
        assert one[1][:, 0].equal(together[1][:, at])
        assert one[2].equal(together[2])


@needs_triton
@pytest.mark.parametrize("draws", [1, 3])
def test_a_forced_token_takes_the_place_of_a_draw(draws: int) -> None:
    """The other rows draw what they would, and its log-probability is the model's."""
    from treegen.ops.sampling.kernels import draw_blocks

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 9000, generator=generator) * 4
    seeds = torch.randint(0, 2**62, (6, draws), generator=generator)
    forced = torch.tensor([-1, 0, 8999, -1, 4096, -1])
    greedy, temperature = torch.arange(6) % 3 == 1, torch.full((6,), 0.8)

    def drawn_with(forced: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        given = (logits, seeds, torch.zeros_like(seeds), temperature, greedy)
        logits_PV, seeds_PN, steps_PN, *more = (tensor.to(DEVICE) for tensor in given)
        return draw_blocks(logits_PV, seeds_PN, steps_PN, more[0], more[1], forced)

    drawn = drawn_with(None)
    tokens, logprobs, lse = drawn_with(forced.to(DEVICE))
    want = torch.where(forced[:, None] < 0, drawn[0].cpu(), forced[:, None])
    assert tokens.cpu().equal(want) and lse.equal(drawn[2])
    torch.testing.assert_close(logprobs.cpu(), logits.log_softmax(-1).gather(1, want))
