"""Lists of updates and shared states against transformers' own recurrence."""

from __future__ import annotations

import pytest
import torch
from delta_cases import Case, own_slots
from torch import Tensor

from treegen.ops.recurrence import RowSlots, fold_update_lists, step


@pytest.mark.parametrize(("seed", "corrects"), [(0, True), (1, True), (2, True), (3, False)])
def test_rows_with_states_of_their_own_are_transformers_rule(seed: int, corrects: bool) -> None:
    case = Case(seed, num_rows=5, corrects=corrects)
    for t in range(12):
        got = step(case.inputs(t), case.states, own_slots(case.own, case.own))
        torch.testing.assert_close(got, case.want[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("seed", "num_tokens", "corrects"),
    [(0, 64, True), (1, 150, True), (2, 512, True), (3, 150, False)],
)
def test_lists_below_a_shared_state_are_transformers_rule(
    seed: int, num_tokens: int, corrects: bool
) -> None:
    """Rows start from two states, and fold their lists at different lengths."""
    case = Case(seed, num_rows=6, num_tokens=num_tokens, corrects=corrects)
    worst = case.decode(num_tokens)
    assert worst < 2e-5 * float(case.want.abs().max())
    assert case.folds >= 6 * (num_tokens // 40)
    for row in range(6):
        case.fold(torch.tensor([row]))
    torch.testing.assert_close(case.states.states[case.own], case.last, rtol=1e-4, atol=1e-5)
    assert (case.states.windows[case.window] == case.windows[num_tokens]).all()


@pytest.mark.parametrize("corrects", [True, False])
def test_lists_in_bfloat16_lose_less_than_states_in_bfloat16(corrects: bool) -> None:
    """k and u are rounded once each, and a state would be in every step."""
    case = Case(3, 8, 48, itemsize=2, heads=(2, 4, 32, 32), corrects=corrects)
    got = torch.stack([case.list_step(t) for t in range(48)]).double()
    want = case.want.double()
    error = ((got - want).norm() / want.norm()).item()
    rounded = case.rounded_states()
    assert error < 6e-3 and error < rounded, (error, rounded)


def test_a_fold_of_nothing_is_a_copy() -> None:
    case = Case(0, num_rows=2)
    before: Tensor = case.states.states[case.base].clone()
    nothing = torch.zeros(2, dtype=torch.int64)
    fold_update_lists(case.states, case.base, case.own, nothing, case.pages)
    assert torch.equal(case.states.states[case.own], before)


def test_rows_know_what_they_have() -> None:
    rows = RowSlots(torch.zeros(2, 3, dtype=torch.int64))
    assert not rows.has_lists and rows.num_rows == 3
    assert RowSlots(torch.zeros(6, 3, dtype=torch.int64)).has_lists
