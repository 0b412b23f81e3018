"""The page pool and the rows' arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegen.engine.rows.table import RowTable
from treegen.ops.cache.pool import LayerKV, PagedCache, PagePool, Pages, table_slots
from treegen.ops.sampling.draw import HostDraws


@given(st.data())
def test_every_page_has_as_many_owners_as_it_says(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 20)))
    tables: list[Pages] = []
    for _ in range(data.draw(st.integers(0, 25))):
        what = data.draw(st.sampled_from(["allocate", "share", "free"]))
        if what == "allocate":
            count = data.draw(st.integers(0, pool.num_free))
            tables.append(pool.allocate(count, contiguous=data.draw(st.booleans())))
            assert len(np.unique(tables[-1])) == count
            assert 0 not in tables[-1], "page 0 is padding"
        elif tables:
            index = data.draw(st.integers(0, len(tables) - 1))
            if what == "share":
                tables.append(pool.share(tables[index]))
            else:
                pool.free(tables.pop(index))
        pool.check(tables)
        assert pool.num_free + len(np.unique(np.concatenate([[], *tables]))) == pool.num_pages
    for table in tables:
        pool.free(table)
    pool.check([])
    assert pool.num_free == pool.num_pages


def test_segments_get_consecutive_pages_where_there_are_some() -> None:
    pool = PagePool(12)
    taken = pool.allocate(12)
    pool.free(taken[[0, 2, 3, 4, 7, 8]])
    assert (np.diff(pool.allocate(3, contiguous=True)) == 1).all()
    assert len(pool.allocate(3, contiguous=True)) == 3


FEW_AND_MANY = pytest.mark.parametrize("num", [2, 30])


@FEW_AND_MANY
def test_misuse_is_caught(num: int) -> None:
    pool = PagePool(num + 2)
    pages = pool.allocate(num)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="wrong reference counts"):
        pool.check([])
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed a free page"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="shared a free page"):
        pool.share(pages)


@FEW_AND_MANY
def test_pages_freed_together_may_repeat(num: int) -> None:
    pool = PagePool(num + 1)
    pages = pool.allocate(num)
    pool.share(pages)
    pool.free(np.concatenate([pages, pages[:1]]))
    assert (pool.num_free, pool.num_freed) == (2, 1)
    assert type(pool.num_free) is type(pool.num_freed) is int, "JSON has no NumPy numbers"
    pool.free(pages[1:])
    pool.check([])
    assert (pool.num_free, pool.num_freed) == (num + 1, num)


def test_copied_tokens_arrive_in_every_layer() -> None:
    layers = [LayerKV(torch.randn(6, 4, 2, 3), torch.randn(6, 4, 2, 5)) for _ in range(2)]
    before = [layer.keys.clone() for layer in layers]
    cache = PagedCache(layers, 5, 4)
    source = table_slots(np.array([2, 5], dtype=np.int32), 3, 6, 4)
    assert source.tolist() == [11, 20, 21]
    target = table_slots(np.array([1], dtype=np.int32), 1, 4, 4)
    cache.copy_tokens(source, target)
    for layer, old in zip(layers, before, strict=True):
        want = old.clone()
        want.view(-1, 2, 3)[target] = old.view(-1, 2, 3)[source]
        torch.testing.assert_close(layer.keys, want, rtol=0, atol=0)
        assert layer.values.view(-1, 2, 5)[target].equal(layer.values.view(-1, 2, 5)[source])


def test_rows_keep_what_was_recorded_while_the_arrays_grow() -> None:
    rows = RowTable(num_logprobs=2)
    rng = np.random.default_rng(1)
    slots = rows.add(100)
    want = np.empty((100, 70), dtype=np.int64)
    for step in range(70):
        want[:, step] = rng.integers(0, 1000, 100)
        top = rng.integers(0, 1000, (100, 2))
        logprobs = np.full(100, -step, np.float32)
        alternatives = top, -top.astype(np.float32)
        rows.append(slots, HostDraws(want[:, step], logprobs, logprobs, *alternatives, None))
        some = slots[step % 3 :: 3]
        rows.add_pages(some, np.arange(1, len(some) + 1, dtype=np.int32))
    assert rows.tokens(slots) == [tuple(row) for row in want.tolist()]
    assert [row[-2:] for row in rows.alternatives(slots)[0]] == [tuple(row) for row in top.tolist()]
    assert rows.logprobs(slots[5:6])[0][3] == -3
    tables = [rows.table[slot, : rows.num_pages[slot]].tolist() for slot in slots]
    pages = rows.take_pages(slots[:20])
    assert pages.tolist() == [page for table in tables[:20] for page in table]
    taken = rows.take_tables(slots[20:50])
    assert [table.tolist() for table in taken] == tables[20:50]
    assert not rows.num_pages[slots[:50]].any() and not rows.table[slots[:50]].any()
    assert rows.num_pages[slots[50]] and rows.take_tables(slots[:0]) == []
    rows.release(slots[:30])
    assert len(rows.used()) == 70
    again = rows.add(40)
    assert len(set(again.tolist()) | set(slots[30:].tolist())) == 110
    assert not rows.count[again].any()
