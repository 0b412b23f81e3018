"""Models with latent attention under everything that a sample can have, by chance.

All that comes out must be what one row draws alone from latents, in whichever form they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from latent_cases import FAMILIES, load
from mixed_models import Mixed
from tiny_models import known, save_tiny_model

from treegen import LLM

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    @functools.cache
    def found(family: str) -> LLM:
        if not known(family):
            pytest.skip(f"this transformers has no {family}")
        path: Path = save_tiny_model(tmp_path_factory.mktemp(family), family, seed=1)
        return load(path)

    return found


def test_whatever_samples_have_they_come_out_as_if_alone(
    loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    Mixed(loaded("deepseek_v3"), 0, monkeypatch).run()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_likewise_for_many_seeds(
    family: str, loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(100, 125):
        with monkeypatch.context() as patch:
            Mixed(loaded(family), seed, patch).run()
