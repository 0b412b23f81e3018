"""Everything at once, by chance; for more of it call `MixedRun(seed).run()` with other seeds."""

from __future__ import annotations

import pytest
from fakes import SmallLists, fold_hashes
from mixed_runs import MixedRun

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 32))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_runs_together_comes_out_as_if_alone(seed: int) -> None:
    MixedRun(seed).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_likewise_on_a_model_with_recurrent_layers(seed: int) -> None:
    MixedRun(seed, recurrent=True).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_likewise_where_tokens_are_guessed(seed: int) -> None:
    MixedRun(seed, speculates=True).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_likewise_where_rows_list_updates_of_states(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.model.recurrent.state_batch.fold_update_lists", fold_hashes)
    MixedRun(seed, recurrent=True, delta=SmallLists(1, 1, 8, 8, 4)).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_likewise_where_draws_depend_on_the_text(seed: int) -> None:
    MixedRun(seed, penalized=True, speculates=seed % 2 == 1, recurrent=seed % 4 == 0).run()


# In 334, samples of a path have different budgets. 1116 continues a sample that was cut in what
# closes its thinking. In 53, 5433 and 7013, samples continue the text of a grammar that contains
# the opening tag; no budget applies to that text.
@pytest.mark.parametrize("seed", [*SEEDS, 53, 334, 1116, 5433, 7013])
def test_likewise_where_texts_have_grammars(seed: int) -> None:
    pytest.importorskip("llguidance")
    speculates, penalized = seed % 2 == 1, seed % 3 == 0
    MixedRun(
        seed, structured=True, penalized=penalized, speculates=speculates, recurrent=seed % 4 == 0
    ).run()
