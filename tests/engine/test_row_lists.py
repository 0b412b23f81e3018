"""What rows that list updates leave behind, and what they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import HistoryModel, SmallLists, _hashed, _listed_hashes, fold_hashes

from treegen.engine.features.update_lists import RowUpdateLists
from treegen.engine.rows.table import RowTable
from treegen.model.recurrent.state_batch import fold_lists, states_of_rows
from treegen.ops.cache.state_cache import NO_STATE, StateCache

DELTA = SmallLists(1, 1, 8, 8, 4)
BASE = 12345  # the state of the prompt


def all_siblings(slots: Any) -> Any:
    """All of the rows belong to one request."""
    return np.full(len(slots), len(slots))


def started(
    num_rows: int, limit: int, num_states: int = 40
) -> tuple[RowTable, Any, RowUpdateLists]:
    """Rows below one state, which is in the first slot."""
    cache = HistoryModel(recurrent=True, delta=DELTA).new_cache(9, 4, num_states).states
    assert cache is not None
    ((windows, states),) = cache.layers
    base = cache.allocate_one()
    windows[base], states[base, 0] = torch.tensor([-7, BASE]), BASE
    rows = RowTable()
    slots = rows.add(num_rows)
    rows.limit[slots], rows.count[slots] = limit, 1
    lists = RowUpdateLists(rows, cache)
    assert lists.count_startable(slots, all_siblings) == num_rows
    lists.take(slots, base, lambda _: np.full(1, num_rows))
    return rows, cache, lists


def steps(cache: StateCache, lists: RowUpdateLists, num_rows: int, num: int) -> list[int]:
    """Decode tokens 0, 1, ... in all rows; returns the states before each and after the last."""
    order = np.arange(num_rows)
    expected = [BASE]
    for token in range(num):
        given = lists.step(order)
        fold_lists(cache, given.folds)
        batch = SimpleNamespace(
            tokens_T=torch.full((num_rows,), token),
            states=states_of_rows(given.inputs, cache.layers),
        )
        expected.append(_hashed(expected[-1], token))
        assert _listed_hashes(cast(Any, batch), DELTA) == [expected[-1]] * num_rows
        cache.check(
            [np.array([1]), lists.get_owned_slots(order)[0]], *lists.get_owned_slots(order)[1:]
        )
    return expected


@pytest.mark.parametrize("num", [1, 2, 3, 5, 6, 7, 8, 9, 12, 13])
def test_rows_leave_the_state_where_a_segment_ends(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.model.recurrent.state_batch.fold_update_lists", fold_hashes)
    _, cache, lists = started(5, 30)
    expected = steps(cache, lists, 5, num)
    ((windows, states),) = cache.layers

    def left(row: int, num_generated: int) -> tuple[int, list[int]]:
        found, now, before = lists.transfer_states(row, num_generated)
        at = [slot for slot in (now, before) if slot != NO_STATE]
        assert windows[at, 1].tolist() == states[at, 0].tolist()
        return found, states[at, 0].tolist()

    both = [expected[num], expected[num - 1]] if num > 1 else [expected[1]]
    assert left(0, num) == left(1, num + 4) == (num, both)
    # The last token was drawn in vain.
    assert left(2, num - 1) == ((num - 1, [expected[num - 1]]) if num > 1 else (0, []))
    assert left(3, num - 2) == (0, []) and left(4, 0) == (0, [])
    assert cache.num_free_windows == cache.num_windows and not cache.num_cut_pages


def test_a_row_without_room_for_its_state_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.model.recurrent.state_batch.fold_update_lists", fold_hashes)
    _, cache, lists = started(2, 4, num_states=4)
    expected = steps(cache, lists, 2, 3)
    others = cache.allocate(cache.num_free)
    assert lists.transfer_states(0, 3) == (0, NO_STATE, NO_STATE)
    cache.free(others[:1].tolist())
    found, now, before = lists.transfer_states(1, 3)
    made = cache.layers[0][1][[now, before], 0].tolist()
    assert (found, made) == (3, [expected[3], expected[2]])


def test_rows_take_what_their_limits_ask_for() -> None:
    # Few tokens: pages alone. Many: a slot, and a page for when it has the row's state.
    for limit, pages, owned in ((2, 1, 0), (3, 1, 0), (4, 2, 0), (5, 2, 0), (40, 1, 1)):
        _, cache, lists = started(4, limit)
        own, slots, windows = lists.get_owned_slots(np.arange(4))
        assert len(slots) == 4 * pages and (own > 0).sum() == 4 * owned and len(windows) == 4
        lists.release(np.arange(4))
        assert cache.num_free == cache.num_slots - 1
    rows, cache, lists = started(2, 40, num_states=9)
    more = rows.add(6)
    rows.limit[more], rows.count[more] = 40, 1
    # Of 9 slots 1 has the prompt's state. Two rows have a slot each, and a slot is cut for both.
    assert cache.num_free == 5
    assert lists.count_startable(more, all_siblings) == 3
