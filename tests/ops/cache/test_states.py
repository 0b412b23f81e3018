"""Slots for recurrent states, and which of them a pass reads and writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treegen.common.spec import DeltaSpec
from treegen.model.recurrent.state_batch import Piece, StateBatch, states_of_pieces, states_of_rows
from treegen.ops.cache.state_cache import NO_STATE, StateCache


def cache_of(num_slots: int) -> StateCache:
    return StateCache(
        [[torch.zeros(num_slots + 1, 3), torch.zeros(num_slots + 1, 2, 2)]], num_slots
    )


def test_each_slot_has_one_owner() -> None:
    cache = cache_of(4)
    slots = [cache.allocate_one() for _ in range(3)]
    assert sorted(slots) == sorted(set(slots)) and NO_STATE not in slots
    assert cache.num_free == 1
    cache.check([np.array(slots)])
    cache.check([np.array([slots[0], NO_STATE]), np.array(slots[1:])])
    with pytest.raises(AssertionError):
        cache.check([np.array(slots[1:])])
    with pytest.raises(AssertionError):
        cache.check([np.array(slots), np.array(slots[:1])])
    cache.free([slots[0], NO_STATE])
    cache.check([np.array(slots[1:])])
    with pytest.raises(AssertionError):
        cache.free(slots[:1])
    assert set(cache.allocate(2).tolist()) == {1, 2, 3, 4} - set(slots[1:])
    cache.reset(np.array(slots[1:]))
    cache.check([np.array(slots[1:])])


DELTA = DeltaSpec(2, 4, 32, 32, 4)


def test_pages_of_lists_are_cut_out_of_slots() -> None:
    """Random takes and returns of slots, pages and windows; the account is checked each time."""
    assert DELTA.pages == 2
    rng, num_slots = np.random.default_rng(0), 9
    layers = [[torch.zeros(num_slots + 2 + 5, 3, 4), torch.zeros(num_slots + 2, 4, 32, 32)]]
    cache = StateCache(layers, num_slots, DELTA)
    assert cache.num_windows == 5 and cache.spare == num_slots + 1
    slots: list[int] = []
    pages = windows = np.empty(0, dtype=np.int64)
    was_cut = 0
    for _ in range(300):
        if rng.random() < 0.5:
            slots += cache.allocate(int(rng.integers(cache.num_free + 1))).tolist()
            room = cache.num_free * DELTA.pages + cache.num_cut_pages
            pages = np.append(pages, cache.allocate_pages(int(rng.integers(room + 1))))
            more = cache.allocate_windows(int(rng.integers(cache.num_free_windows + 1)))
            windows = np.append(windows, more)
        else:
            gone = rng.permutation(slots)[: rng.integers(len(slots) + 1)].astype(int).tolist()
            cache.free(gone)
            slots = [slot for slot in slots if slot not in gone]
            for name in ("pages", "windows"):
                permuted = rng.permutation(pages if name == "pages" else windows)
                part = rng.integers(len(permuted) + 1)
                if name == "pages":
                    cache.free_pages(permuted[:part])
                    pages = permuted[part:]
                else:
                    cache.free_windows(permuted[:part])
                    windows = permuted[part:]
        was_cut += cache.num_cut_pages > 0
        cache.check([np.array(slots, dtype=np.int64)], pages, windows)
        assert not set(pages // DELTA.pages) & set(slots)
    assert was_cut > 20
    with pytest.raises(AssertionError):
        cache.check([np.array(slots, dtype=np.int64)], pages[1:], windows)
    cache.reset(np.array(slots[:1], dtype=np.int64))
    cache.check([np.array(slots[:1], dtype=np.int64)])


def test_a_copy_has_all_layers() -> None:
    cache = cache_of(3)
    for tensor in cache.layers[0]:
        tensor[2] = 5
    cache.copy(2, 3)
    assert all((tensor[3] == 5).all() and not tensor[1].any() for tensor in cache.layers[0])


def run(batch: StateBatch, slots: dict[int, list[int]], tokens: Tensor) -> list[list[int]]:
    """Lists of tokens for states: what each row's sequence has up to it. Writes slots too."""
    seen: list[list[int]] = [[] for _ in tokens]
    for each in batch.runs:
        rows = torch.arange(len(tokens))[each.rows].view(each.num, each.length).tolist()
        reads = [NO_STATE] * each.num if each.read_slots_N is None else each.read_slots_N.tolist()
        before = [slots[slot] for slot in reads]
        for state, written, writes in zip(before, rows, each.write_slots_N.tolist(), strict=True):
            for row in written:
                state = seen[row] = [*state, int(tokens[row])]
            slots[writes] = state
    return seen


@given(st.data())
def test_pieces_run_after_what_they_go_on_from(data: st.DataObject) -> None:
    """Trees of pieces in any order, some in place; each row sees its own sequence."""
    num = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=num, max_size=num))
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    reads = [data.draw(st.sampled_from([NO_STATE, 90, *range(1, at + 1)])) for at in range(num)]
    pieces = [Piece(starts[at], lengths[at], reads[at], at + 1) for at in range(num)]
    tokens = torch.arange(starts[-1]) + 100
    shuffled = data.draw(st.permutations(pieces))
    layers = [[torch.zeros(99, 3)]]
    seen = run(states_of_pieces(shuffled, layers), {NO_STATE: [], 90: [-1, -2]}, tokens)
    for at, piece in enumerate(pieces):
        above = [] if piece.read_slot == NO_STATE else [-1, -2]
        if 0 < piece.read_slot < 90:
            parent = pieces[piece.read_slot - 1]
            above = seen[parent.start + parent.num - 1]
        for row in range(piece.num):
            assert seen[piece.start + row] == [
                *above,
                *tokens[piece.start : piece.start + row + 1].tolist(),
            ], at


def test_rows_that_are_many_run_in_parts() -> None:
    """So that what is gathered at a time is bounded."""
    layers = [[torch.zeros(1, dtype=torch.uint8).expand(50, 2**24)]]
    reads, writes = np.arange(1, 41), np.arange(2, 42)
    batch = states_of_rows(np.stack([reads, writes]), layers)
    assert [each.num for each in batch.runs] == [16, 16, 8]
    assert [each.rows for each in batch.runs] == [slice(0, 16), slice(16, 32), slice(32, 40)]
    assert torch.cat([each.write_slots_N for each in batch.runs]).tolist() == writes.tolist()
