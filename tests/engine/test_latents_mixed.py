"""Models with latent attention under everything that a sample can have, by chance.

All that comes out must be what one row draws alone from latents, in whichever form they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latent_cases import FAMILIES, load
from mixed_models import Mixed
from tiny_models import EXACT, HYBRID, known, save_tiny_model

from treegen import LLM
from treegen.ops.attention import key_selection, sparse_attention

pytest.importorskip("llguidance")

# Most texts are longer than what a token attends to.
_SELECTED: dict[str, Any] = {"index_topk": 12, "max_position_embeddings": 320}
_AVERAGED = {"indexer_budget": 12, "indexer_compress_ratio": 4, "max_position_embeddings": 320}
_BLOCKS: dict[str, dict[str, Any]] = {
    "glm5_next_on_text": {**_SELECTED, "index_kpool": 4},
    "minimax_m3_vl_on_text": {
        "index_topk_blocks": 3,
        "index_block_size": 4,
        "max_position_embeddings": 320,
    },
    "qwen4_exp": {**_AVERAGED, "indexer_n_heads": 16},
}
_SELECTING = {"deepseek_v32": _SELECTED, "glm_moe_dsa": _SELECTED, **_BLOCKS}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    @functools.cache
    def found(family: str) -> LLM:
        if not known((EXACT | HYBRID)[family][0]):
            pytest.skip(f"this transformers has no {family}")
        settings = _SELECTING.get(family, {})
        path: Path = save_tiny_model(tmp_path_factory.mktemp(family), family, seed=1, **settings)
        return load(path)

    return found


def test_whatever_samples_have_they_come_out_as_if_alone(
    loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    Mixed(loaded("deepseek_v3"), 0, monkeypatch).run()


@pytest.mark.parametrize("wide", [1, 3])
def test_likewise_with_selected_keys(
    wide: int, loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (key_selection, sparse_attention):
        monkeypatch.setattr(module, "MIN_WIDE_ROWS", wide, raising=False)
    monkeypatch.setattr(sparse_attention, "MAX_MASKED", 99)
    Mixed(loaded("glm_moe_dsa"), wide, monkeypatch).run()


@pytest.mark.parametrize("family", _BLOCKS)
def test_likewise_with_selected_blocks(
    family: str, loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_selection, "MIN_WIDE_ROWS", 2)
    monkeypatch.setattr(sparse_attention, "MAX_MASKED", 99)
    Mixed(loaded(family), 2, monkeypatch).run()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [*FAMILIES, *_SELECTING])
def test_likewise_for_many_seeds(
    family: str, loaded: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(100, 125):
        with monkeypatch.context() as patch:
            Mixed(loaded(family), seed, patch).run()
