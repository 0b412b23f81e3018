"""The table of rows: their phases, and what it hands back of what was generated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treegen.engine.rows.queue import ALLOWED
from treegen.engine.rows.table import RowPhase, RowTable
from treegen.ops.sampling.draw import AsyncDraws, Draws, HostDraws


def test_rows_change_their_phase_as_the_table_says() -> None:
    assert RowPhase.__doc__ is not None
    lines = [line.replace(",", " ").split() for line in RowPhase.__doc__.splitlines()]
    names = RowPhase.__members__
    documented = {line[0]: {word for word in line[1:] if word in names} for line in lines if line}
    for before in RowPhase:
        after = {phase.name for phase in RowPhase if ALLOWED[phase, before]}
        assert documented[before.name] == after


def test_what_was_generated_comes_back_as_python_numbers() -> None:
    rows = RowTable(num_logprobs=2)
    slots = rows.add(3)[::-1]
    held: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots.tolist()}
    for step, some in enumerate((slots, slots[:2], slots[1:2])):
        tokens = 10**6 * step + some
        logprobs = np.float32(-0.1) * some.astype(np.float32)
        top = np.stack([tokens, tokens + 1], axis=1), np.stack([logprobs, -logprobs], axis=1)
        rows.append(some, HostDraws(tokens, logprobs, logprobs, *top, None))
        for slot, *pair in zip(some.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            held[slot].append((pair[0], pair[1]))
    tokens_of = [tuple(token for token, _ in held[slot]) for slot in slots.tolist()]
    assert rows.tokens(slots) == tokens_of
    assert {type(token) for tokens in tokens_of for token in tokens} == {int}
    logprobs_of = [tuple(value for _, value in held[slot]) for slot in slots.tolist()]
    assert rows.logprobs(slots) == logprobs_of
    # Several numbers a token come in one row.
    top_of = [tuple(i for t in tokens for i in (t, t + 1)) for tokens in tokens_of]
    assert rows.alternatives(slots)[0] == top_of
    assert rows.tokens(slots[:0]) == []


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_slots_that_come_and_go_keep_what_is_theirs(num_logprobs: int) -> None:
    rng = np.random.default_rng(num_logprobs)
    rows = RowTable(num_logprobs)
    held: dict[int, list[tuple[int, float, list[int]]]] = {}
    for _ in range(600):
        if rng.random() < 0.2:
            held |= {slot: [] for slot in rows.add(int(rng.integers(1, 5))).tolist()}
        some = np.array([slot for slot in held if rng.random() < 0.7], dtype=np.int64)
        tokens, logprobs = rng.integers(0, 999, len(some)), rng.random(len(some), np.float32)
        top = rng.integers(0, 999, (len(some), num_logprobs))
        alternatives = top, -top.astype(np.float32)
        rows.append(some, HostDraws(tokens, logprobs, logprobs, *alternatives, None))
        assert rows.last[some].tolist() == tokens.tolist()
        for slot, *each in zip(
            some.tolist(), tokens.tolist(), logprobs.tolist(), top.tolist(), strict=True
        ):
            held[slot].append((each[0], each[1], each[2]))
        for slot in [slot for slot in held if rng.random() < 0.01]:
            _check(rows, slot, held.pop(slot), rng)
            rows.release(np.array([slot]))
    for slot, written in held.items():
        _check(rows, slot, written, rng)
    assert max(map(len, held.values())) > 128


def _check(
    rows: RowTable, slot: int, written: list[tuple[int, float, list[int]]], rng: np.random.Generator
) -> None:
    at = np.array([slot])
    assert rows.tokens(at) == [tuple(token for token, _, _ in written)]
    assert rows.logprobs(at) == [tuple(value for _, value, _ in written)]
    top, values = rows.alternatives(at)
    assert top == [tuple(token for _, _, tokens in written for token in tokens)]
    assert values == [tuple(-token for token in top[0])]
    start, stop = sorted(rng.integers(0, len(written) + 1, 2).tolist())
    expected = [token for token, _, _ in written[start:stop]]
    assert rows.generated.between(slot, start, stop).tolist() == expected


def test_memory_follows_the_tokens_of_all_not_the_longest() -> None:
    rows = RowTable(num_logprobs=5)
    slots = rows.add(4096)
    for step in range(20_000):
        some = slots if step < 8 else slots[:1]
        top = np.zeros((len(some), 5), np.int64)
        logprobs = some.astype(np.float32)
        alternatives = top, top.astype(np.float32)
        rows.append(some, HostDraws(some, logprobs, logprobs, *alternatives, None))
    arrays = [array for array in vars(rows.generated).values() if isinstance(array, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 50 * 2**20
    assert len(rows.tokens(slots)[0]) == 20_000


def test_draws_come_to_the_host_by_name_one_entry_each() -> None:
    draws = Draws(
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]),
        torch.tensor([5.0, 6.0]),
        None,
        None,
        torch.tensor([[7.0, 8.0], [9.0, 10.0]]),
    )
    found = AsyncDraws(draws).wait().flat().at(np.array([1, 2]))
    assert found.tokens.tolist() == [2, 3] and found.logprobs.tolist() == [-2, -3]
    assert found.lse.tolist() == [5, 6]
    assert found.top_tokens is None and found.top_logprobs is None
    assert found.signals is not None and found.signals.tolist() == [[7, 8], [9, 10]]
