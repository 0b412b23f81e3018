"""Attention that folds keys in: right, and to the bit the same however keys are shared and cut.

On a GPU, or in Triton's interpreter on a CPU, which has to be chosen before Triton is imported. The
interpreter multiplies with numpy, which sums in an order of its own, so only a GPU has equal bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    MIXED,
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

from treegen.common.device import StagingBuffer
from treegen.errors import InputError
from treegen.ops.attention import Level, attend
from treegen.ops.attention.level import HostLevel

try:
    from treegen.ops.attention.gpu import attend as attend_module
    from treegen.ops.attention.gpu import state, work_units
except ImportError:
    pytest.skip("needs triton", allow_module_level=True)
with contextlib.suppress(ImportError, AttributeError):  # Gluon is experimental
    from treegen.ops.attention.gpu import fold_tall_kernels

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
# Logits are rounded to 2^-14; 16-bit weights are rounded before they are summed.
TOLERANCE = {torch.float32: (2e-4, 2e-4), torch.bfloat16: (2**-6, 1e-2)}


def check(case: Case, dtype: torch.dtype, *, page_size: int = 4, **options: Any) -> None:
    check_attention(case, dtype, "invariant", TOLERANCE[dtype], page_size=page_size, **options)


def check_same(a: Tensor, b: Tensor) -> None:
    """Equal to the bit on a GPU."""
    bound = 0.0 if CUDA else 1e-6
    torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_ragged_trees(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PART", [4096, 16][seed % 2])
    case = make_case(**random_tree(seed, max_depth=4), seed=seed, round_to=dtype)
    check(case, dtype)
    options: dict[str, Any] = {["window", "chunk"][seed // 3]: [2, 7, 30][seed % 3]}
    if seed % 2:
        options |= {"softcap": 3.0, "sinks": torch.randn(4)}
    check(case, dtype, scale=0.3, **options)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_heads_and_causal_spans(heads: tuple[int, int]) -> None:
    for dtype in DTYPES:
        case = make_case(*MIXED, heads=heads, dims=(48, 32), causal=[False, True], round_to=dtype)
        check(case, dtype, page_size=16)


class Sequence16:
    """One sequence's queries, keys and values, and attention to them in every arrangement."""

    def __init__(self, length: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> None:
        """Random numbers that spread the softmax.

        For the interpreter, queries and keys have so few bits that logits are exact in any order of
        sums. Otherwise, a logit could be rounded to another multiple of 2^-14.
        """
        random = torch.Generator().manual_seed(length)
        self.q, self.k, self.v = (
            (torch.randn(length, num, width, generator=random) * size).to(DEVICE, dtype)
            for num, size in ((heads[0], 3), (heads[1], 1), (heads[1], 1))
        )
        if not CUDA:
            self.q, self.k = ((numbers * 8).round() / 8 for numbers in (self.q, self.k))
        self.length = length

    def attend(
        self,
        rows: Sequence[int],
        cuts: Sequence[int],
        *,
        causal: bool = False,
        runs: Sequence[int] = (),
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Rows' out and LSE where keys up to the cuts are shared by all of them.

        Args:
            runs: So many rows, one after another, share their further keys; by default none do.
        """
        size, next_page, levels = 16, 1, []
        pools = [torch.full((size, *x.shape[1:]), torch.nan) for x in (self.k, self.v)]
        bounds = [0, *cuts]
        spans = [(0, len(rows), start, stop) for start, stop in zip(bounds, cuts, strict=False)]
        own = [(0, len(rows), bounds[-1], self.length)]
        if not causal:
            ends = np.cumsum(runs or [1] * len(rows)).tolist()
            firsts = [0, *ends]
            own = [(i, j, bounds[-1], rows[j - 1] + 1) for i, j in zip(firsts, ends, strict=False)]
        for groups in [[span] for span in spans] + [own]:
            table = []
            for _, _, start, stop in groups:
                num = -(-(stop - start) // size)
                table.append([*range(next_page, next_page + num)])
                next_page += num
                for at, pool in enumerate(pools):
                    part = torch.full((num * size, *pool.shape[1:]), torch.nan)
                    part[: stop - start] = (self.k, self.v)[at][start:stop].cpu()
                    pools[at] = torch.cat([pool, part])
            width = max(map(len, table))
            first, last = ([group[at] for group in groups] for at in (0, 1))
            columns = (
                first,
                last,
                [[*pages, *[0] * (width - len(pages))] for pages in table],
                [high - low for *_, low, high in groups],
                [low for *_, low, _ in groups],
            )
            q_start, q_stop, pages_GP, kv_len, kv_start = (
                torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns
            )
            is_own = (causal or bool(runs)) and groups is own
            levels.append(Level(q_start, q_stop, pages_GP, kv_len, kv_start, is_own))
        keys, values = (
            pool.to(DEVICE, self.q.dtype).unflatten(0, (-1, size)).contiguous() for pool in pools
        )
        positions = torch.tensor(rows, device=DEVICE)
        return attend(
            self.q[list(rows)],
            keys,
            values,
            levels,
            positions,
            impl="invariant",
            return_lse=True,
            **options,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "options"), [((4, 2), {}), ((2, 2), {"window": 21}), ((4, 1), {"softcap": 5.0})]
)
def test_bits_of_a_row_are_its_own(
    heads: tuple[int, int],
    options: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In prefill and decoding, alone and beside others, shared or not, in units of any height."""
    rng = np.random.default_rng(heads[0])
    length = 900 if CUDA else 75
    monkeypatch.setattr(state, "PART", 256 if CUDA else 32)
    sequence = Sequence16(length, heads, 128 if CUDA else 16, dtype)
    rows = sorted(rng.choice(np.arange(length // 2, length), 7, replace=False).tolist())
    whole = sequence.attend(range(length), [], causal=True, **options)
    want = [tensor[rows] for tensor in whole]
    choose = work_units.kind_of
    for turn in range(12 if CUDA else 5):
        kind = [1, 2, 3, None][turn % 4]
        monkeypatch.setattr(state, "kind_of", choose if kind is None else lambda *_, k=kind: k)
        blocks = rng.choice(np.arange(1, rows[0] // 16 + 1), int(rng.integers(0, 3)), replace=False)
        cuts = sorted((16 * blocks).tolist())
        at = sorted(rng.choice(7, int(rng.integers(1, 8)), replace=False).tolist())
        got = sequence.attend([rows[i] for i in at], cuts, **options)
        for actual, expected in zip(got, want, strict=True):
            check_same(actual, expected[at])
        # As where guesses are verified: some tokens of each of several rows.
        runs = rng.integers(1, 10, 4).tolist()
        starts = rng.integers(rows[0], length - 9, 4).tolist()
        some = [start + i for start, num in zip(starts, runs, strict=True) for i in range(num)]
        verified = sequence.attend(some, cuts, runs=runs, **options)
        for actual, expected in zip(verified, whole, strict=True):
            check_same(actual, expected[some])
        if turn % 2:
            spans = sequence.attend(range(length), cuts[:1] if cuts else [], causal=True, **options)
            first = cuts[0] if cuts else 0
            # Rows before the cut see keys of the shared level that lie after them.
            check_same(spans[0][first:], whole[0][first:])


@pytest.mark.skipif(not CUDA, reason="the kernel for tall units needs a GPU")
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (16, 1), (7, 1)])
@pytest.mark.parametrize("width", [64, 128])
def test_tall_units_have_the_same_bits(
    heads: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share many keys in two levels, some of them in several parts."""
    rng = np.random.default_rng(width + heads[0])
    monkeypatch.setattr(state, "PART", 256)
    monkeypatch.setattr(state, "_TALL", 0)  # so that few units stay tall
    monkeypatch.setattr(
        state, "kind_of", lambda rows, *_: 3 if rows.max(initial=0) > heads[0] else 1
    )
    launches = []
    launch = fold_tall_kernels.launch_fold_tall

    def launch_tall(*args: Any, **options: Any) -> None:
        launches.append(options)
        launch(*args, **options)

    monkeypatch.setattr(fold_tall_kernels, "launch_fold_tall", launch_tall)
    for shared in (1, 64, 65, 240, 16 * int(rng.integers(20, 60)), int(rng.integers(130, 999))):
        num_rows = int(rng.integers(2, 200))
        cut, start = int(rng.integers(1, num_rows)), -(-shared // 16) * 16
        more = [Group(0, cut, 16 * int(rng.integers(1, 30)), start), Group(cut, num_rows, 7, start)]
        ends = [start + (more[0] if row < cut else more[1]).kv_len for row in range(num_rows)]
        own = [Group(row, row + 1, int(rng.integers(0, 9)), ends[row]) for row in range(num_rows)]
        case = make_case(
            [[Group(0, num_rows, shared)], more, own],
            ends,
            heads=heads,
            dims=(width, width),
            seed=shared,
            round_to=torch.bfloat16,
        )
        keys, values, levels = paged(case, torch.bfloat16, 64)
        levels = [to_device(level, DEVICE) for level in levels]
        q, positions = case.q.to(DEVICE, torch.bfloat16), case.positions.to(DEVICE)
        pools = keys.to(DEVICE), values.to(DEVICE)
        results = []
        for has_gluon in (True, False):
            with monkeypatch.context() as patch:
                if not has_gluon:
                    patch.setattr(attend_module, "_has_gluon", lambda device: False)
                results.append(
                    attend(q, *pools, levels, positions, impl="invariant", return_lse=True)
                )
        for tall, triton in zip(*results, strict=True):
            assert torch.equal(tall, triton)
        want, _ = oracle(case)
        torch.testing.assert_close(results[0][0].cpu().double(), want, rtol=2**-6, atol=2**-6)
    if attend_module._has_gluon(torch.device(DEVICE, 0)):
        assert {options["first"] for options in launches} == {True, False}


def test_graphs_keep_which_levels_are_causal() -> None:
    """A graph's kernel for tall units hides no key, so a causal level may not take its place."""
    shape = work_units.WorkShape(16, 1, 4, 64, False)
    cpu = torch.device("cpu")

    def levels(*causal: bool) -> tuple[HostLevel, ...]:
        one = np.ones(1, dtype=np.int64)
        sizes = one * 0, one * 16, one[:, None], one * 64
        return tuple(
            HostLevel(*sizes, one * 64 * i, causal=hides) for i, hides in enumerate(causal)
        )

    graph = state.StaticState(levels(False, True, False), cpu, invariant=True)
    graph.work(shape)
    for causal, fits in [((True, False, False), False), ((False, True, False), True)]:
        other = state.TritonState(levels(*causal), cpu, invariant=True)
        assert graph.load(other, StagingBuffer()) == fits


def test_float64_is_refused() -> None:
    sequence = Sequence16(20, (2, 2), 16, torch.float64)
    with pytest.raises(InputError, match="impl 'invariant' does not support float64"):
        sequence.attend([19], [])
