"""The newer families under everything that a sample can have, by chance.

All that comes out must be what one row draws alone, and the tree of a family is tested against
transformers in `tests/model/test_families.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from latent_cases import load
from mixed_models import Mixed
from tiny_models import EXACT, HYBRID, known, save_tiny_model

from treegen import LLM
from treegen.errors import ModelWarning

pytest.importorskip("llguidance")

NEWER = [
    "apertus1p5_on_text",
    "axk2",
    "cohere_compass_on_text",
    "deepseek_v32",
    "dory",
    "dots3_note_on_text",
    "ernie4_5_vl_moe_on_text",
    "exaone",
    "glm4v_moe_on_text",
    "glm5_next_on_text",
    "glm_moe_dsa",
    "granite4_vision_on_text",
    "hy_v4",
    "hy_v4_vl_on_text",
    "kimi_k25_on_text",
    "lara_mini",
    "llama4",
    "llama4_on_text",
    "minimax_m3_vl_on_text",
    "mistral_large4_on_text",
    "phi4_multimodal_on_text",
    "qwen4_exp",
    "qwen4_exp_on_text",
    "sarvam_mla",
    "sarvam_moe",
    "step3p7_on_text",
]

# One of each kind of attention; the others are alike, and take as long. Those that select keys or
# blocks are in `test_latents_mixed.py`.
KINDS = {
    "cohere_compass_on_text",
    "dory",
    "exaone",
    "kimi_k25_on_text",
    "lara_mini",
    "llama4",
}


def load_family(family: str, tmp_path: Path) -> LLM:
    if not known((EXACT | HYBRID)[family][0]):
        pytest.skip(f"this transformers has no {family}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)  # of a context that ends early
        return load(save_tiny_model(tmp_path, family, seed=1))


@pytest.mark.parametrize(
    "family",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.soak) for name in NEWER],
)
def test_whatever_samples_have_they_come_out_as_if_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mixed(load_family(family, tmp_path), NEWER.index(family), monkeypatch).run()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", NEWER)
def test_likewise_for_many_seeds(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_family(family, tmp_path)
    for seed in range(100, 104):
        with monkeypatch.context() as patch:
            Mixed(llm, seed, patch).run()
