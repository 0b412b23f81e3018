"""Mixtures of experts that two processes compute: they draw what one draws, or are refused by name.

Most families divide each expert. Others keep experts whole, of which each process has some.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from treegen import LLM, Node, SamplingParams
from treegen.errors import ModelError
from treegen.model.config import load_spec
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup

TREE = Node(
    "Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 2,
    children=[Node(text, id=text) for text in ("Q: Bob has 14 pens.\nA:", "Q: Cy?\nA:", "Q: How")],
)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
# Two parts of such an expert are no rows that grouped products take, so experts stay whole.
NARROW = 20
FAST = ["gpt_oss", "longcat_flash", "qwen2_moe"]
DIVIDED = [
    *FAST,
    "afmoe",
    "aria_text",
    "axk1",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "kolibri1",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen3_moe",
    "solar_open",
    "aria_on_text",
    "qwen3_vl_moe_on_text",
    "axk2",
    "deepseek_v32",
    "ernie4_5_vl_moe_on_text",
    "glm4v_moe_on_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_on_text",
    "kimi_k25_on_text",
    "llama4",
    "llama4_on_text",
    "minimax_m3_vl_on_text",
    "mistral_large4_on_text",
    "sarvam_mla",
    "sarvam_moe",
    "step3p7_on_text",
]
NO_PLAN, RECURRENT = "transformers has no tensor-parallel plan for them", "have recurrent layers"
UNEQUAL = "their layers have different numbers of heads"
REFUSED = {
    "dbrx": NO_PLAN,
    "jetmoe": NO_PLAN,
    "dots3_note_on_text": UNEQUAL,
    "bailing_hybrid": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "jamba": RECURRENT,
    "kimi_linear": RECURRENT,
    "lfm2_moe": RECURRENT,
    "minimax": RECURRENT,
    "nemotron_h": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "qwen3_5_moe_on_text": RECURRENT,
    "qwen3_next": RECURRENT,
    "zaya": RECURRENT,
    "qwen4_exp_on_text": RECURRENT,
    "qwen4_exp": RECURRENT,
    "lara_mini": RECURRENT,
    "glm5_next_on_text": RECURRENT,
}


def save(folder: Path, family: str, **settings: Any) -> None:
    if not tiny_models.known((tiny_models.EXACT | tiny_models.HYBRID)[family][0]):
        pytest.skip("the installed transformers does not know the family")
    tiny_models.save_tiny_model(folder, family, **settings)


def assert_same_draws(path: Path, group: RankGroup) -> LLM:
    """Compare greedy draws of two processes with those of one; returns rank 0's part."""
    one = LLM(str(path), device="cpu", memory="4MiB", max_rows=16).run(TREE, GREEDY)
    model = group.load(partial(load_model, str(path)))
    llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", max_rows=16)
    two = llm.run(TREE, GREEDY)
    for got, want in zip(two.completions, one.completions, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    return llm


@pytest.mark.parametrize(
    "family",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.soak) for name in DIVIDED],
)
def test_two_ranks_draw_what_one_process_draws(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    save(tmp_path, family)
    assert_same_draws(tmp_path, group)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("glm_moe_dsa", {"index_topk": 12}),
        ("minimax_m3_vl_on_text", {"index_topk_blocks": 3, "index_block_size": 4}),
    ],
)
def test_two_ranks_select_the_same_keys(
    family: str, settings: dict[str, Any], group: RankGroup, tmp_path: Path
) -> None:
    save(tmp_path, family, max_position_embeddings=128, **settings)
    llm = assert_same_draws(tmp_path, group)
    assert llm.spec.index_topk == 12 and llm.spec.context_length == 128


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                "mixtral",
                "deepseek_v2",
                "olmoe",
                "granitemoe",
                "minimax_m2",
                "afmoe",
                "phimoe",
            )
        ),
    ],
)
def test_experts_too_narrow_to_be_cut_stay_whole(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    own = tiny_models.EXACT[family][1]
    # Where a family has both names, the experts of some are the first, of some the second.
    widths = {"moe_intermediate_size", "intermediate_size"} & own.keys() or {"intermediate_size"}
    save(tmp_path, family, **dict.fromkeys(widths, NARROW))
    llm = assert_same_draws(tmp_path, group)
    shapes = [
        weight.shape
        for name, weight in llm.model.module.named_parameters()
        if name.endswith("experts.gate_up_proj")
    ]
    assert shapes and all(shape[0] == 2 and 2 * NARROW in shape for shape in shapes)


def test_each_rank_has_whole_experts_of_gpt_oss(group: RankGroup, tmp_path: Path) -> None:
    save(tmp_path, "gpt_oss")
    module = assert_same_draws(tmp_path, group).model.module
    weights = dict(module.named_parameters())
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        assert len(weights[f"model.layers.0.mlp.experts.{name}"]) == 2
    assert len(weights["model.layers.0.mlp.router.weight"]) == 4


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    with pytest.raises(
        ModelError, match=f"models cannot be divided among GPUs: .*{REFUSED[family]}"
    ):
        load_spec(tmp_path, ranks=2)


def test_as_many_experts_as_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "gpt_oss", num_local_experts=3)
    with pytest.raises(ModelError, match=r"experts.gate_up_proj \(3\) is not divisible by 2"):
        load_spec(tmp_path, ranks=2)


def test_every_family_with_experts_is_in_a_list_here() -> None:
    found = set()
    for name, (model_type, settings) in (tiny_models.EXACT | tiny_models.HYBRID).items():
        if tiny_models.known(model_type):
            config = tiny_models.config_of(model_type, **settings).get_text_config(decoder=True)
            keys = {**settings, **settings.get("ffn_config", {})}
            if any("expert" in key for key in keys) or "expert" in repr(type(config)).lower():
                found.add(name)
    assert found <= {*DIVIDED, *REFUSED}, found - {*DIVIDED, *REFUSED}
