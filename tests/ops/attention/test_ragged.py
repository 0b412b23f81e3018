"""Work lists of rows that have several query rows each read what the levels say, each key once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from devices import DEVICE, needs_triton

from treegen.ops.attention import HostLevel, Items, attend, prepare_host
from treegen.ops.attention.level import IntArray

units = pytest.importorskip("treegen.ops.attention.gpu.work_units")
ragged = pytest.importorskip("treegen.ops.attention.gpu.ragged")

PAGE = 16
Read = Counter[tuple[int, int, int, int]]


def levels_of(
    rng: np.random.Generator, num: int, offsets: IntArray, *, small: bool = False
) -> list[HostLevel]:
    """A trunk, a level of groups of items with gaps, and own keys; pages are numbers of no page."""
    levels, pages = [], 0
    for depth, size in enumerate((num, max(num // 3, 1), 1)):
        starts = np.arange(0, num, size)
        causal = depth == 2
        if depth == 1:
            starts = starts[rng.random(len(starts)) < 0.7]
        stops = np.minimum(starts + size, num)
        most = int(rng.choice([40, 700] if small else [40, 700, 5000]))
        keys = rng.integers(int(causal), most, len(starts))
        width = -(-most // PAGE)
        table = pages + np.arange(len(starts) * width).reshape(len(starts), width)
        pages += table.size
        items = Items(offsets, starts, stops)
        levels.append(
            HostLevel(
                offsets[starts], offsets[stops], table, keys, keys * 0 + 7, causal, items=items
            )
        )
    return levels


def read_expected(levels: list[HostLevel]) -> Read:
    """Which row reads which key of which page table: (table, row, key, origin), once each."""
    found: Read = Counter()
    offset = 0
    for level in levels:
        for g, (start, stop) in enumerate(zip(level.start_G, level.stop_G, strict=True)):
            table = offset + g * level.pages_GP.shape[1]
            for row in range(start, stop):
                for key in range(0, level.kv_len_G[g], units.KEY_BLOCK):
                    found[table, row, key, int(level.kv_start_G[g])] += 1
        offset += level.pages_GP.size
    return found


def read(work: object, levels: list[HostLevel], per_head: int) -> Read:
    found: Read = Counter()
    pages = work.pages  # type: ignore[attr-defined]
    for kind, table in zip(work.kinds, work.units, strict=True):  # type: ignore[attr-defined]
        for part, start, stop, at, low, high, origin, causal, page in table.tolist():
            assert 0 <= part < work.num_parts  # type: ignore[attr-defined]
            assert start < stop <= start + max(units.HEIGHTS[kind] // per_head, 1)
            assert causal == (at >= sum(each.pages_GP.size for each in levels[:-1]))
            if low < high:
                assert page == pages[at + low // PAGE]
            for row in range(start, stop):
                for key in range(low, high, units.KEY_BLOCK):
                    found[at, row, key, origin] += 1
    return found


def test_each_row_reads_each_of_its_keys_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(25):
        num, per_head = int(rng.integers(1, 20)), int(rng.choice([1, 2, 4, 32]))
        memos: list[dict[object, object]] = []
        seed = int(rng.integers(1000))
        for turn in range(3):  # other rows of the same items, whose levels are remembered
            rows = rng.integers(1, 9, num)
            offsets = np.concatenate([[0], rows.cumsum()])
            levels = levels_of(np.random.default_rng(seed), num, offsets)
            if turn:
                for level, memo in zip(levels, memos, strict=True):
                    assert level.items is not None
                    level.items.memo.update(memo)
            size = -(-int(offsets[-1]) // 32) * 32
            shape = units.WorkShape(size, 2, per_head, PAGE, False)
            work = ragged.build_ragged_list(levels, shape, 132)
            assert read(work, levels, per_head) == read_expected(levels)
            assert work.causal and not work.complete
            memos = [level.items.memo for level in levels if level.items is not None]


def test_passes_of_a_size_are_cut_alike_while_rows_end() -> None:
    """So that one graph computes them."""
    shapes = set()
    for num in (16, 13, 9, 6):
        offsets = np.arange(num + 1) * (64 // num)
        trunk = Items(offsets, np.array([0]), np.array([num]))
        own = Items(offsets, np.arange(num), np.arange(num) + 1)
        one, many, none = np.array([1000]), np.full(num, 200), np.zeros((num, 16), np.int64)
        start, stop = offsets[:-1], offsets[1:]
        levels = [
            HostLevel(start[:1], stop[-1:], none[:1], one, one * 0, False, items=trunk),
            HostLevel(start, stop, none, many, many * 0, True, items=own),
        ]
        work = ragged.build_ragged_list(levels, units.WorkShape(64, 8, 4, 64, False), 132)
        shapes.add((work.num_parts, tuple(len(table) > 0 for table in work.units)))
    assert len(shapes) == 1


@needs_triton
def test_the_kernel_computes_what_the_reference_does() -> None:
    rng = np.random.default_rng(1)
    device = torch.device(DEVICE)
    for _ in range(12 if device.type == "cuda" else 2):  # the interpreter is slow
        num = int(rng.integers(2, 7))
        rows = rng.integers(1, 9, num)
        offsets = np.concatenate([[0], rows.cumsum()])
        levels = levels_of(rng, num, offsets, small=True)
        base, own = int(rng.integers(50)), levels[-1]
        own.kv_len_G[:] = np.maximum(own.kv_len_G, rows)
        # The last of an item's rows sees its last key.
        last = (own.kv_len_G + own.kv_start_G)[np.repeat(np.arange(num), rows)]
        place = np.arange(len(last)) - np.repeat(offsets[:-1], rows)
        positions = torch.from_numpy(last - np.repeat(rows, rows) + place).to(device)
        pages = sum(level.pages_GP.size for level in levels)
        keys, values = torch.randn(2, pages, PAGE, 2, 16, device=device)
        q_THD = torch.randn(len(last), 8, 16, device=device)
        found = []
        for impl in ("triton", "reference"):
            prepared = prepare_host(levels, positions, device, impl)
            window = base + 1 if base % 2 else None
            found.append(attend(q_THD, keys, values, prepared, window=window, return_lse=True))
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
