"""Selecting keys by index scores, and attention to them, against the obvious computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from treegen.ops.attention import Level, key_selection, prepare, sparse_attention

PAGE = 4
# Rows of each group, the position of its first key, and its number of keys; by level.
LEVELS = [
    ([(0, 9), (9, 12)], [0, 0], [11, 2], False),
    ([(0, 1), (1, 4), (10, 12)], [11, 11, 2], [1, 30, 9], False),
    ([(0, 1), (1, 4), (4, 9), (9, 10), (10, 12)], [12, 41, 11, 2, 11], [1, 3, 5, 7, 2], True),
]
LENGTHS = [13, 42, 43, 44, 12, 13, 14, 15, 16, 9, 12, 13]
"""Keys that each row sees. Row 12 sees none."""
ROWS = len(LENGTHS) + 1


def make_levels(generator: torch.Generator) -> tuple[list[Level], list[list[int]], int]:
    """Make levels on shuffled pages; return the cache slots of each row's keys, in order."""
    num_pages = sum(-(-num // PAGE) for _, _, lengths, _ in LEVELS for num in lengths) + 1
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    slots: list[list[int]] = [[] for _ in range(ROWS)]
    levels = []
    for rows, starts, lengths, causal in LEVELS:
        tables = [[free.pop() for _ in range(-(-num // PAGE))] for num in lengths]
        width = max(map(len, tables))
        levels.append(
            Level(
                torch.tensor([start for start, _ in rows]).int(),
                torch.tensor([stop for _, stop in rows]).int(),
                torch.tensor([[*table, *[0] * (width - len(table))] for table in tables]).int(),
                torch.tensor(lengths).int(),
                torch.tensor(starts).int(),
                causal=causal,
            )
        )
        for (start, stop), table, num in zip(rows, tables, lengths, strict=True):
            for row in range(start, stop):
                slots[row] += [table[i // PAGE] * PAGE + i % PAGE for i in range(num)]
    return levels, [row[:num] for row, num in zip(slots, [*LENGTHS, 0], strict=True)], num_pages


def pool_of(slots: list[list[int]], num_pages: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Make a pool with random numbers in slots that are used, and NaN in all others."""
    pool = torch.full((num_pages * PAGE, *shape), math.nan, dtype=torch.float64)
    used = sorted({slot for row in slots for slot in row})
    generator = torch.Generator().manual_seed(seed)
    pool[used] = torch.randn(len(used), *shape, generator=generator, dtype=torch.float64)
    return pool.view(num_pages, PAGE, *shape)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"MIN_WIDE_ROWS": 1},
    {"MIN_WIDE_ROWS": 2, "MAX_ELEMENTS": 60},
    {"MIN_WIDE_ROWS": 99},
    {"MIN_WIDE_ROWS": 3, "MAX_MASKED": 0},
    {"MIN_WIDE_ROWS": 1, "_reads_whole": lambda *_: True},
]


@pytest.mark.parametrize("num", [1, 6, 16])
@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_attend_to_the_keys_with_the_highest_scores(
    num: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        for module in (key_selection, sparse_attention):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    generator = torch.Generator().manual_seed(num)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    levels, slots, num_pages = make_levels(generator)
    positions_T = torch.tensor([*[num_keys - 1 for num_keys in LENGTHS], 0])
    prepared = prepare(levels, positions_T)
    # Few heads, so that many scores are zero.
    q_THD, weights_TH = randn(ROWS, 2, 3).float(), randn(ROWS, 2).float()
    index, keys, values = (
        pool_of(slots, num_pages, shape, seed) for seed, shape in enumerate([(3,), (2, 5), (2, 4)])
    )
    q_THK, sinks_H = randn(ROWS, 4, 5), randn(4)
    index = index.float()
    assert key_selection.count_keys(prepared) == max(LENGTHS)
    selected_TS = key_selection.select_keys(
        q_THD, weights_TH, index, prepared, positions_T, key_selection.IndexForm(num)
    )
    own_slot_T = torch.tensor([row[-1] if row else 0 for row in slots])
    chosen = sparse_attention.SelectedKeys(selected_TS, own_slot_T, prepared)
    out_THV = sparse_attention.attend_selected(q_THK, keys, values, chosen, 0.3, sinks_H)
    for row, its in enumerate(slots):
        if not its:
            assert (selected_TS[row] == -1).all() and not out_THV[row].any()
            continue
        k_LD = index.flatten(0, 1)[its]
        scores_L = weights_TH[row] @ (q_THD[row] @ k_LD.T).relu()
        best_S = scores_L.sort(descending=True, stable=True).indices[:num]
        assert selected_TS[row].tolist() == [*best_S.tolist(), *[-1] * (num - len(best_S))]
        k_SHK, v_SHV = (
            pool.flatten(0, 1)[its][best_S].repeat_interleave(2, 1) for pool in (keys, values)
        )
        logits_HS = torch.einsum("hk,shk->hs", q_THK[row], k_SHK) * 0.3
        weights_HS = torch.cat([logits_HS, sinks_H[:, None]], 1).softmax(-1)[:, :-1]
        want_HV = torch.einsum("hs,shv->hv", weights_HS, v_SHV)
        torch.testing.assert_close(out_THV[row], want_HV)


def choose_blocks(scores_HL: Tensor, form: key_selection.IndexForm) -> list[list[int]]:
    """The positions that each head selects, in order, by the score of each token's key."""
    chosen = []
    for scores_L in scores_HL:
        num = len(scores_L)
        starts = range(0, num - num % form.size if form.is_pooled else num, form.size)
        blocks = [list(range(start, min(start + form.size, num))) for start in starts]
        own = (num - 1) // form.size
        ranked = sorted(
            range(len(blocks)),
            key=lambda at: (
                -math.inf
                if own - form.local < at <= own
                else -scores_L[blocks[at][-1 if form.is_pooled else slice(None)]].max().item()
            ),
        )
        kept = {place for at in ranked[: form.num] for place in blocks[at]}
        tail = range(len(blocks) * form.size, num) if form.is_pooled else ()
        chosen.append(sorted(kept | {*tail}))
    return chosen


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    "form",
    [
        key_selection.IndexForm(1, 3, is_pooled=True),
        key_selection.IndexForm(2, 4, is_pooled=True),
        key_selection.IndexForm(3, 1, is_pooled=True),
        key_selection.IndexForm(1, 3, local=1),
        key_selection.IndexForm(2, 5),
        key_selection.IndexForm(3, 4, local=2),
    ],
)
def test_rows_attend_to_the_blocks_with_the_highest_scores(
    form: key_selection.IndexForm, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels start and end inside blocks. Blocks have a key, or heads take the best of its keys."""
    for name, value in settings.items():
        for module in (key_selection, sparse_attention):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    generator = torch.Generator().manual_seed(form.size)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    levels, slots, num_pages = make_levels(generator)
    positions_T = torch.tensor([*[num_keys - 1 for num_keys in LENGTHS], 0])
    prepared = prepare(levels, positions_T)
    q_THD = randn(ROWS, 2, 3).float()
    weights_TH = randn(ROWS, 2).float() + 3 if form.is_pooled else None
    index, keys, values = (
        pool_of(slots, num_pages, shape, seed) for seed, shape in enumerate([(3,), (2, 5), (2, 4)])
    )
    q_THK, index = randn(ROWS, 4, 5), index.float()
    own_slot_T = torch.tensor([row[-1] if row else 0 for row in slots])
    picked = key_selection.select_keys(q_THD, weights_TH, index, prepared, positions_T, form)
    blocks_TBX = key_selection.read_blocks(
        index, prepared, positions_T, own_slot_T, form.size, torch.float32
    )
    chosen = sparse_attention.SelectedKeys(picked, own_slot_T, prepared)
    out_THV = sparse_attention.attend_selected(q_THK, keys, values, chosen, 0.3)
    for row, its in enumerate(slots):
        if not its:
            assert not out_THV[row].any()
            continue
        k_LD = index.flatten(0, 1)[its]
        last = its[-form.size :] if len(its) % form.size == 0 else its[-1:] * form.size
        assert torch.equal(blocks_TBX[row], index.flatten(0, 1)[last])
        scores_HL = q_THD[row] @ k_LD.T
        if weights_TH is not None:
            scores_HL = (weights_TH[row] @ scores_HL.relu())[None]
        want = choose_blocks(scores_HL, form)
        picks = picked[row] if weights_TH is None else picked[row][None]
        assert [sorted(each[each >= 0].tolist()) for each in picks] == want
        for head, places in enumerate(want if len(want) > 1 else 2 * want):
            k_SK, v_SV = (pool.flatten(0, 1)[its][places, head] for pool in (keys, values))
            weights_HS = (q_THK[row, 2 * head : 2 * head + 2] @ k_SK.T * 0.3).softmax(-1)
            torch.testing.assert_close(out_THV[row, 2 * head : 2 * head + 2], weights_HS @ v_SV)


def test_nothing_is_scored_if_every_key_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_selection, "_score_rows", None)
    levels, slots, num_pages = make_levels(torch.Generator().manual_seed(0))
    positions_T = torch.zeros(ROWS, dtype=torch.int64)
    index = pool_of(slots, num_pages, (3,), 0).float()
    selected_TS = key_selection.select_keys(
        torch.ones(ROWS, 2, 3),
        torch.ones(ROWS, 2),
        index,
        prepare(levels, positions_T),
        positions_T,
        key_selection.IndexForm(max(LENGTHS)),
    )
    assert selected_TS.shape == (ROWS, max(LENGTHS))
