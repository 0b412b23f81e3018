"""Tokens that are drawn where others were guessed have the distribution of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treegen.common.params import SamplingParams
from treegen.engine.rows.table import VerifyInput
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw

DRAWS = 100_000
SIZE = 30


def _drawn(logits_V: torch.Tensor, steps: int) -> torch.Tensor:
    """One draw of each of so many rows, whose seeds are their numbers."""
    rows = torch.zeros(DRAWS, dtype=torch.int64)
    sampling = SamplingBatch.of([SamplingParams()], rows)
    seeds = torch.arange(DRAWS)[:, None]
    logits_PV = logits_V.expand(DRAWS, SIZE)
    return draw(logits_PV, seeds, torch.full_like(seeds, steps), sampling).tokens_PN[:, 0]


@pytest.mark.parametrize("how", ["most likely", "at random", "by the same numbers"])
def test_draws_have_the_models_distribution_whatever_was_guessed(how: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_V = 1.5 * torch.randn(SIZE, generator=generator)
    near_V = logits_V + 0.3 * torch.randn(SIZE, generator=generator)
    chances = logits_V.softmax(-1).double().numpy()
    guessed = {
        "most likely": torch.full((DRAWS,), int(logits_V.argmax())),
        "at random": torch.randint(SIZE, (DRAWS,), generator=generator),
        "by the same numbers": _drawn(near_V, 7),
    }[how]
    one = np.ones(DRAWS, dtype=np.int64)
    guesses = VerifyInput(guessed.numpy()[:, None], one, 0 * one)
    # Each row draws at the guess's position, and once more after it.
    drawn_T = np.stack([_drawn(logits_V, 7).numpy(), _drawn(logits_V, 8).numpy()], 1).ravel()
    counted, is_last = guesses.find_accepted_rows(drawn_T)
    accepted = guesses.num_accepted(drawn_T)
    assert counted.tolist() == [2 * r + p for r in range(DRAWS) for p in range(accepted[r] + 1)]
    assert (guesses.index_T[counted][is_last] == accepted).all()
    for place in (0, 1):
        tokens = drawn_T[counted[guesses.index_T[counted] == place]]
        found = np.bincount(tokens, minlength=SIZE)
        wanted = chances * len(tokens)
        chi_square = float(((found - wanted) ** 2 / wanted).sum())
        assert chi_square < 65  # 29 degrees of freedom: more in one case of 8,000
    share = accepted.mean()
    if how == "most likely":
        assert share == pytest.approx(chances.max(), abs=0.01)
    elif how == "at random":
        assert share == pytest.approx(1 / SIZE, abs=0.01)
    else:  # more often than two independent draws are equal
        assert share > 2 * float((chances * near_V.softmax(-1).double().numpy()).sum())


def test_guesses_of_rows_are_ragged() -> None:
    guesses = VerifyInput(np.array([[5, 6, 7], [8, 9, -1], [1, -1, -1]]), np.array([3, 2, 0]), None)  # type: ignore[arg-type]
    assert guesses.offsets.tolist() == [0, 4, 7, 8]
    assert guesses.inputs(np.array([2, 3, 4])).tolist() == [2, 5, 6, 7, 3, 8, 9, 4]
    drawn = np.array([5, 6, 0, 7, 8, 9, 9, 1])
    assert guesses.num_accepted(drawn).tolist() == [2, 2, 0]
    draws, is_last = guesses.find_accepted_rows(drawn)
    assert draws.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert is_last.tolist() == [False, False, True, False, False, True, True]
