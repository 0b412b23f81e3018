"""What the last tokens of rows are looked up by, and what is found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from treegen.common.drafter import NOTHING, NewTokens
from treegen.engine.speculative import ngrams
from treegen.engine.speculative.ngrams import NgramDrafter


@dataclass(frozen=True)
class _Prompt:
    id: str
    tokens: NDArray[np.int32]


class Rows:
    """Rows that draw given tokens. prompts: by request."""

    def __init__(self, prompts: dict[int, list[int]]) -> None:
        self.drafter, self.counts = NgramDrafter(), dict[int, int]()
        self._prompts = {k: _Prompt(str(k), np.array(v, np.int32)) for k, v in prompts.items()}

    def draw(self, request: int, drawn: dict[int, list[int]], *, fresh: bool = False) -> None:
        slots = np.array(sorted(drawn))
        num = np.array([len(drawn[slot]) for slot in slots.tolist()])
        tokens = np.full((len(slots), int(num.max())), 99)
        for row, slot in zip(tokens, slots.tolist(), strict=True):
            row[: len(drawn[slot])] = drawn[slot]
        count = np.array([0 if fresh else self.counts.get(slot, 0) for slot in slots.tolist()])
        same = np.full(len(slots), request)
        new = NewTokens(slots, same, slots, count, tokens, num)
        self.drafter.observe(new, self._prompts.__getitem__)
        self.drafter.run_deferred()
        for slot, before, more in zip(slots.tolist(), count, num, strict=True):
            self.counts[slot] = int(before + more)

    def guess(self, slot: int, num_drafts: int = 4) -> list[int]:
        (found,) = self.drafter.draft(np.array([slot]), np.array([num_drafts])).tokens_RK.tolist()
        stop = found.index(NOTHING) if NOTHING in found else num_drafts
        assert all(token == NOTHING for token in found[stop:])
        return list(found[:stop])


def test_a_row_goes_on_as_its_sibling_did() -> None:
    rows = Rows({0: [1, 2, 3]})
    rows.draw(0, {0: [10, 11, 12, 13, 14]})
    rows.draw(0, {1: [10, 11]})
    assert rows.guess(1) == [12, 13, 14]
    rows.draw(0, {1: [12]})
    assert rows.guess(1, num_drafts=1) == [13]
    rows.draw(0, {0: [15, 16]})
    assert rows.guess(1) == [13, 14, 15, 16]


def test_the_first_token_is_guessed_by_the_end_of_the_prompt_and_the_prompt_is_repeated() -> None:
    rows = Rows({0: [5, 6, 7, 8, 9, 5, 6]})
    rows.draw(0, {0: [7]})
    assert rows.guess(0) == [8, 9, 5, 6]


def test_what_most_samples_say_is_guessed() -> None:
    rows = Rows({0: [1]})
    for slot, token in enumerate([20, 21, 21, 21, 20]):
        rows.draw(0, {slot: [3, 4, token, 30 + token]})
    rows.draw(0, {9: [3, 4]})
    assert rows.guess(9, num_drafts=2) == [21, 51]


def test_other_prompts_are_guessed_from_by_two_tokens_or_more() -> None:
    rows = Rows({0: [1], 1: [2]})
    rows.draw(0, {0: [10, 11, 12, 13]})
    rows.draw(1, {1: [50, 10]})
    assert rows.guess(1) == []
    rows.draw(1, {1: [11]})
    assert rows.guess(1) == [12, 13]


def test_a_slot_that_another_row_has_taken_is_that_rows() -> None:
    rows = Rows({0: [1, 2], 1: [3, 4]})
    rows.draw(0, {0: [10, 11, 12]})
    rows.draw(1, {0: [40]}, fresh=True)
    assert rows.guess(0) == []
    rows.draw(1, {0: [41, 42]})
    rows.draw(1, {1: [40]})
    assert rows.guess(1) == [41, 42]


def test_a_full_log_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "_MAX_ENTRIES", 60)
    rows, rng = Rows({0: [1, 2]}), np.random.default_rng(0)
    for _ in range(30):
        rows.draw(0, {0: rng.integers(3, 9, 5).tolist(), 1: rng.integers(3, 9, 2).tolist()})
        assert len(rows.guess(0)) <= 4
    rows.draw(0, {2: [10, 11, 12, 13]})
    rows.draw(0, {3: [10]})
    assert rows.guess(3) == [11, 12, 13]


def test_a_kind_of_guess_that_is_always_wrong_is_left_for_others() -> None:
    rows = Rows({0: [1]})
    rows.draw(0, {0: [10, 11, 12]})
    rows.draw(0, {1: [10]})
    drafts = rows.drafter.draft(np.array([1]), np.array([2]))
    for _ in range(50):
        rows.drafter.update_acceptance(drafts.kind_R, np.array([1]), np.array([0]))
    after = rows.drafter.draft(np.array([1]), np.array([2]))
    assert after.kind_R[0] != drafts.kind_R[0] and after.chance_R[0] < drafts.chance_R[0]


def test_the_first_guess_and_those_after_it_have_chances_of_their_own() -> None:
    """Where rows part at a token and then say the same for long."""
    drafter = Rows({0: [1]}).drafter
    kinds, chances = np.array([3, 3]), drafter._chance_2K[:, 3].copy()
    for _ in range(50):
        drafter.update_acceptance(kinds, np.array([1, 6]), np.array([0, 6]))
    first, later = drafter._chance_2K[:, 3]
    assert 0.4 < first < 0.6 < chances[0] and later > 0.9 > chances[1]
    others = np.delete(np.arange(drafter._chance_2K.shape[1]), 3)
    fresh = NgramDrafter()._chance_2K[:, others]
    assert drafter._chance_2K[:, others] == pytest.approx(fresh)
