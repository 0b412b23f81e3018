"""How many guesses are verified follows from what passes take, and settles where it must."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from treegen.engine.speculative.draft_length import DraftLengthController

MAX_DRAFTS = 8


def drive(
    cost: Callable[[int], float],
    rows: int,
    chance: float,
    steps: int,
    *,
    sync: float = 1.0,
    pace: DraftLengthController | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Speed with guesses over speed without, and tokens of a row in a step.

    Args:
        cost: Seconds of a pass of so many tokens.
        sync: How much longer one takes that verifies.
    """
    rng = np.random.default_rng(seed)
    pace = pace or DraftLengthController(free_tokens=150.0, weight_keys=1e9)
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        took, drawn = cost(rows), rows
        if pace.is_due(rows, 0, MAX_DRAFTS):
            num, expected = pace.choose_lengths(
                np.full(rows, MAX_DRAFTS), np.full(rows, chance), 0, MAX_DRAFTS
            )
            took *= sync
            if num.any():
                took = cost(rows + int(num.sum())) * sync
                right = np.minimum(rng.geometric(1 - chance, rows) - 1, num)
                drawn += int(right.sum())
                pace.record_accepted(expected, int(right.sum()))
                pace.measure(rows + int(num.sum()), 0, took, verified=True)
        else:
            pace.measure(rows, 0, took, verified=False)
        seconds, tokens = seconds + took, tokens + drawn
    return tokens / seconds * cost(rows) / rows, tokens / steps / rows


def flat(tokens: int) -> float:
    return max(1.0, tokens / 150)


@pytest.mark.parametrize(("rows", "least"), [(4, 2.0), (16, 1.8), (48, 1.4)])
def test_free_tokens_are_used(rows: int, least: float) -> None:
    speed, tokens = drive(flat, rows, 0.6, 400)
    assert speed > least and tokens > least


@pytest.mark.parametrize(
    ("cost", "rows", "chance", "sync"),
    [
        (flat, 1024, 0.9, 1.1),
        (flat, 150, 0.3, 1.2),
        (flat, 16, 0.0, 1.3),
        (flat, 64, 0.1, 1.2),
        (float, 16, 0.8, 1.1),
        (float, 200, 0.5, 1.0),
        (lambda t: 0.5 + t / 20, 8, 0.2, 1.1),
        (lambda t: 1.0 if t <= 16 else 3.0, 16, 0.5, 1.1),
    ],
)
def test_a_run_is_never_much_slower(
    cost: Callable[[int], float], rows: int, chance: float, sync: float
) -> None:
    speed, _ = drive(cost, rows, chance, 4000, sync=sync)
    assert speed > 0.98


def test_a_disturbed_measurement_is_forgotten() -> None:
    pace = DraftLengthController(free_tokens=150.0, weight_keys=1e9)
    for tokens in (16, 16, 16):
        pace.measure(tokens, 0, 1.0, verified=False)
    for tokens in (40, 40, 40, 80, 80, 80, 120, 120, 120):
        pace.measure(tokens, 0, 50.0, verified=True)
    drive(flat, 16, 0.6, 5000, pace=pace)
    speed, _ = drive(flat, 16, 0.6, 300, pace=pace)
    assert speed > 1.5


def test_passes_are_filled_up_to_what_they_are_padded_to() -> None:
    """Guesses that need not be paid for are verified, however unlikely they are."""
    pace = DraftLengthController(free_tokens=150.0, weight_keys=1e9, multiple=32)
    num, expected = pace.choose_lengths(np.full(5, MAX_DRAFTS), np.full(5, 0.6), 0, MAX_DRAFTS)
    assert int(num.sum()) + 5 == 32
    likely = np.array([0.9, 0.9, 0.9, 0.0, 0.0])
    num, expected = pace.choose_lengths(
        np.array([8, 8, 8, 8, 8]), likely, 0, MAX_DRAFTS, np.full(5, 0.5)
    )
    assert num.tolist() == [8, 8, 8, 0, 0]
    assert expected == pytest.approx(3 * 0.9 * (1 - 0.5**8) / 0.5, rel=1e-3)


def test_what_is_measured_counts_at_the_next_step() -> None:
    pace = DraftLengthController(free_tokens=150.0, weight_keys=1e9)
    drive(flat, 16, 0.6, 40, pace=pace)
    arguments = np.full(16, MAX_DRAFTS), np.full(16, 0.6), 0, MAX_DRAFTS
    first = pace.choose_lengths(*arguments)[0].sum()
    for tokens in (64, 64, 64, 128, 128, 128, 144, 144, 144):
        pace.measure(tokens, 0, 50.0, verified=True)
    assert pace.choose_lengths(*arguments)[0].sum() < first


def test_a_new_run_looks_for_guesses_soon() -> None:
    pace = DraftLengthController(150.0, 1e6)

    def looks(steps: int) -> int:
        found = 0
        for _ in range(steps):
            if pace.is_due(16, 0, 8):
                found += 1
                pace.choose_lengths(np.zeros(16, dtype=np.int64), np.zeros(16), 0, 8)
        return found

    assert looks(1000) > 0, "of guesses that never pay"
    assert not looks(30)
    pace.begin()
    assert 3 <= looks(30) <= 6
