"""Attention over levels equals attention of each row over its whole key set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, Group, dense, make_case, oracle, paged, random_tree
from torch import Tensor

from treegen.ops.attention import attend, cpu_attend, prepare

IMPLS = ["reference", "cpu"]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """Let tensors made without values hold NaN, so that reading what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def check(
    case: Case, impl: str, dtype: torch.dtype, *, layout: str = "paged", **options: Any
) -> None:
    """Compare out and LSE with the oracle by their worst element."""
    want_out, want_lse = oracle(case, **options)
    keys: Any
    values: Any
    if layout == "dense":
        keys, values, levels = dense(case, dtype)
    else:
        keys, values, levels = paged(case, dtype, shuffle=layout == "paged")
    needs = any(case.causal) or options.keys() & {"window", "chunk"}
    positions = case.positions if needs else None
    out, lse = attend(
        case.q.to(dtype), keys, values, levels, positions, impl=impl, return_lse=True, **options
    )
    assert out.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert lse.dtype == wide
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 2e-5,
        torch.bfloat16: 2**-8,
        torch.float16: 2**-10,
    }
    torch.testing.assert_close(
        out.double(), want_out, rtol=tolerance[dtype], atol=tolerance[dtype] / 4
    )
    exact = tolerance[wide]
    torch.testing.assert_close(lse.double(), want_lse, rtol=exact, atol=exact)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(24))
def test_random_ragged_trees(seed: int, impl: str) -> None:
    case = make_case(**random_tree(seed), seed=seed)
    layout = ["paged", "consecutive"][seed % 2]
    check(case, impl, DTYPES[seed // 2 % 2], layout=layout)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(24))
def test_random_trees_with_window_cap_and_sinks(seed: int, impl: str) -> None:
    case = make_case(**random_tree(100 + seed), seed=seed)
    options: dict[str, Any] = {}
    if seed % 2:
        options["window"] = [1, 4, 17, 1000][seed // 2 % 4]
    elif seed % 4:
        options["chunk"] = [1, 4, 17, 1000][seed // 4 % 4]
    if seed % 3:
        options["softcap"] = 3.0
    if seed % 5:
        options["sinks"] = torch.linspace(-3, 3, 4)
    check(case, impl, DTYPES[seed % 2], scale=0.3, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize(
    "dims", [(8, 8), (16, 16), (80, 80), (96, 96), (129, 129), (24, 16), (5, 9)]
)
def test_heads_and_dimensions(dims: tuple[int, int], heads: tuple[int, int], impl: str) -> None:
    groups = [
        [Group(0, 6, 37)],
        [Group(0, 3, 5, 37), Group(3, 5, 9, 37)],
        [Group(r, r + 1, 1 + 3 * r, 50) for r in range(6)],
    ]
    case = make_case(groups, [60] * 6, heads=heads, dims=dims)
    check(case, impl, torch.float32)
    check(case, impl, torch.float32, layout="dense")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["paged", "consecutive", "dense"])
def test_short_types_round_once(dtype: torch.dtype, layout: str, impl: str) -> None:
    groups = [[Group(0, 8, 300)], [Group(r, r + 1, 20 + r, 300) for r in range(8)]]
    case = make_case(groups, [330] * 8, dims=(64, 64), round_to=dtype)
    check(case, impl, dtype, layout=layout)


@pytest.mark.parametrize("layout", ["paged", "consecutive"])
def test_bfloat16_is_no_worse_than_unsplit_attention(layout: str) -> None:
    groups = [[Group(0, 16, 512)], [Group(r, r + 1, 64, 512) for r in range(16)]]
    case = make_case(groups, [600] * 16, dims=(64, 64), heads=(4, 4), round_to=torch.bfloat16)
    want, _ = oracle(case)
    keys, values, levels = paged(case, torch.bfloat16, shuffle=layout == "paged")
    got = attend(case.q.bfloat16(), keys, values, levels)
    shared = (case.keys[0][0], case.values[0][0])
    unsplit = torch.stack(
        [
            torch.nn.functional.scaled_dot_product_attention(
                case.q[r, :, None].bfloat16(),
                torch.cat([shared[0], case.keys[1][r]]).transpose(0, 1).bfloat16(),
                torch.cat([shared[1], case.values[1][r]]).transpose(0, 1).bfloat16(),
            )[:, 0]
            for r in range(16)
        ]
    )
    error = float((got.double() - want).abs().max())
    assert error <= 1.05 * float((unsplit.double() - want).abs().max())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["paged", "consecutive", "dense"])
@pytest.mark.parametrize(
    ("rows", "kv_len"), [(1, 1), (1, 50), (7, 7), (7, 20), (40, 300), (300, 900)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 6}, {"window": 10_000}, {"chunk": 9}, {"chunk": 64}],
    ids=str,
)
def test_chunked_causal_prefill(
    rows: int, kv_len: int, options: dict[str, Any], layout: str, impl: str
) -> None:
    prefix = 30
    groups = [[Group(0, rows, prefix)], [Group(0, rows, kv_len, prefix)]]
    positions = torch.arange(rows) + prefix + kv_len - rows
    case = make_case(groups, positions, heads=(2, 1), dims=(8, 8), causal=[False, True])
    check(case, impl, torch.float64, layout=layout, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"window": 700}, {"chunk": 40}, {"chunk": 610}], ids=str
)
def test_many_causal_groups_at_once(
    softcap: float | None, options: dict[str, Any], impl: str
) -> None:
    lengths = [1, 5, 5, 5, 17, 0, 300, 64, 64]
    groups: list[Group] = []
    positions: list[int] = []
    for i, n in enumerate(lengths):
        kv_len = n + (i % 3) * 33
        groups.append(Group(len(positions), len(positions) + n, kv_len, 600))
        positions += range(600 + kv_len - n, 600 + kv_len)
    case = make_case(
        [[Group(0, len(positions), 600)], groups],
        positions,
        heads=(2, 1),
        dims=(8, 8),
        causal=[False, True],
    )
    check(case, impl, torch.float64, softcap=softcap, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"window": 9}, {"chunk": 8}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_positions_in_any_order(seed: int, options: dict[str, Any], impl: str) -> None:
    random = torch.Generator().manual_seed(seed)
    groups = [[Group(0, 9, 20, 3)], [Group(0, 4, 11, 10), Group(5, 9, 6, 40)]]
    positions = torch.randint(0, 45, (9,), generator=random)
    case = make_case(groups, positions, causal=[seed % 2 == 0, True], seed=seed)
    check(case, impl, torch.float64, **options)


@pytest.mark.parametrize("impl", IMPLS)
def test_long_rows_are_hidden_block_by_block(impl: str) -> None:
    # Longer than a block of keys of the kernel, so that whole blocks are masked.
    positions = torch.cat([torch.arange(0, 1200, 4), torch.arange(2500, 2503)])
    groups = [[Group(0, len(positions), 2000, 0)]]
    case = make_case(groups, positions, heads=(1, 1), dims=(4, 4), causal=[True])
    check(case, impl, torch.float64)
    check(case, impl, torch.float64, window=700)


@pytest.mark.parametrize("impl", IMPLS)
def test_consecutive_positions_out_of_order(impl: str) -> None:
    groups = [[Group(0, 8, 8, 3)], [Group(0, 8, 9000, 11)]]
    positions = torch.tensor([3, 5, 4, 6, 7, 9, 8, 10])
    case = make_case(groups, positions, causal=[True, True])
    check(case, impl, torch.float64)
    case = make_case(groups, positions + 8000, causal=[True, True])
    check(case, impl, torch.float64)
    check(case, impl, torch.float64, window=5000)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["paged", "consecutive"])
@pytest.mark.parametrize("dims", [(64, 64), (64, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_shared_keys(
    dtype: torch.dtype, dims: tuple[int, int], layout: str, impl: str
) -> None:
    groups = [[Group(0, 3, 9000)], [Group(0, 2, 3000, 9000), Group(2, 3, 5000, 9000)]]
    case = make_case(groups, [14000] * 3, heads=(4, 4), dims=dims, round_to=dtype)
    check(case, impl, dtype, layout=layout)


@pytest.mark.parametrize(
    ("layout", "heads", "dims", "dtype"),
    [
        ("consecutive", (8, 4), (128, 128), DTYPES[1]),
        ("consecutive", (12, 4), (160, 96), DTYPES[0]),
        ("paged", (12, 4), (160, 96), DTYPES[1]),
    ],
)
def test_many_rows_read_keys_that_lie_far_apart_from_copies(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    layout: str,
) -> None:
    copied: list[int] = []
    by_head = cpu_attend._attend_by_head

    def noted(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        copied.append(given[1].shape[1])
        return by_head(*given, **options)

    monkeypatch.setattr(cpu_attend, "_attend_by_head", noted)
    groups = [[Group(0, 132, 1100)], [Group(0, 130, 1024, 1100), Group(130, 132, 9, 1100)]]
    case = make_case(groups, [3000] * 132, heads=heads, dims=dims)
    if heads == (8, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        check(case, "cpu", dtype, layout=layout)
        assert not copied  # two threads would wait for each other
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    check(case, "cpu", dtype, layout=layout)
    assert copied == [heads[1]] * 2 or layout == "paged"  # those are gathered first, in pieces


@pytest.mark.parametrize("impl", IMPLS)
def test_a_thousand_groups(impl: str) -> None:
    lengths = torch.randint(0, 30, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [[Group(0, 1000, 10)], [Group(r, r + 1, n, 10) for r, n in enumerate(lengths)]]
    case = make_case(groups, [50] * 1000, heads=(2, 1), dims=(8, 8))
    check(case, impl, torch.float32)
    check(case, impl, torch.float32, layout="consecutive", window=25)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 3])
def test_nothing_to_attend_to(window: int | None, impl: str) -> None:
    groups = [[Group(1, 3, 0, 0), Group(3, 3, 4, 0)], [Group(2, 4, 2, 0)]]
    case = make_case(groups, [50, 50, 1, 50, 50])
    check(case, impl, torch.float32, window=window)
    check(case, impl, torch.float32, window=window, sinks=torch.tensor([0.0, 1.0, -1.0, 9.0]))
    out, lse = attend(
        case.q[:0].float(), *paged(case, torch.float32)[:2], _no_rows(), impl=impl, return_lse=True
    )
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def _no_rows() -> list[Any]:
    return paged(make_case([[], [Group(0, 0, 3)]], []), torch.float32)[2][:1]


@pytest.mark.parametrize("impl", IMPLS)
def test_sharing_a_prefix_changes_nothing(impl: str) -> None:
    shared = [[Group(0, 6, 21)], [Group(r, r + 1, 4 + r, 21) for r in range(6)]]
    case = make_case(shared, [40] * 6, dims=(80, 80))
    repeated = Case(
        q=case.q,
        groups=[[Group(r, r + 1, 25 + r) for r in range(6)]],
        causal=[False],
        positions=case.positions,
        keys=[[torch.cat([case.keys[0][0], k]) for k in case.keys[1]]],
        values=[[torch.cat([case.values[0][0], v]) for v in case.values[1]]],
    )
    results: list[tuple[Tensor, Tensor]] = []
    for each in (case, repeated):
        keys, values, levels = paged(each, torch.float32)
        results.append(attend(each.q.float(), keys, values, levels, impl=impl, return_lse=True))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_unused_slots_are_never_read(poison: float, impl: str) -> None:
    case = make_case(**random_tree(7), seed=7)
    want = oracle(case)
    for shuffle in (False, True):
        keys, values, levels = paged(case, torch.float64, shuffle=shuffle, poison=poison)
        got = attend(case.q, keys, values, levels, impl=impl, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_prepared_levels_serve_layers_of_different_windows(impl: str) -> None:
    case = make_case(**random_tree(3), seed=3)
    keys, values, levels = paged(case, torch.float64)
    prepared = prepare(levels, case.positions, impl)
    assert prepared.impl == impl
    for level in levels:  # the caller may reuse its tensors
        level.kv_len_G.zero_()
        level.pages_GP.zero_()
    for window, chunk in ((None, None), (5, None), (None, 5), (None, None), (2, None), (5, None)):
        got = attend(case.q, keys, values, prepared, window=window, chunk=chunk, return_lse=True)
        want = oracle(case, window=window, chunk=chunk)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
