"""Indexers of sparse layers: unknown code is refused, and weights of heads keep their type."""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EXACT, HYBRID, known, save_tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from treegen.errors import ModelError, ModelWarning
from treegen.model import probe
from treegen.model.checkpoint.families import dense_length
from treegen.model.checkpoint.small_config import (
    build_random_model,
    iter_small_copies,
    low_selection,
)
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.linear.fp4_checkpoint import replace_with_empty_fp4
from treegen.model.linear.fp8 import Fp8Linear, iter_fp8_linears
from treegen.model.load import load_model

if not known(EXACT["deepseek_v32"][0]):
    pytest.skip("this transformers has no deepseek_v32", allow_module_level=True)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

NUM = 16
PRODUCT = (
    "scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) "
    "* self.softmax_scale"
)
RELU = "scores = F.relu(scores)"
SUM = "index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)"
UNKNOWN_CODE = (
    "code of DeepseekV32Indexer .* differs from the code that treegen supports.*transformers>="
)
OTHER_KEYS = "the logits of a small random copy differ"
CHANGES = {
    "per-key scale": (PRODUCT, f"{PRODUCT} * k.abs().amax(-1)[:, None, None, :]", UNKNOWN_CODE),
    "relu squared": (RELU, "scores = F.relu(scores).square()", OTHER_KEYS),
    "no relu": (RELU, "pass", OTHER_KEYS),
    "bias of keys": (SUM, f"{SUM} + k.float().sum(-1)[:, None, :]", OTHER_KEYS),
    "abs after": (SUM, f"{SUM}.abs()", OTHER_KEYS),
    "operator": (
        PRODUCT,
        "scores = (q.float() @ k.transpose(-1, -2).float().unsqueeze(1)) * self.softmax_scale",
        UNKNOWN_CODE,
    ),
    "einsum": (PRODUCT, "scores = torch.einsum('bshd,btd->bsht', q, k)", UNKNOWN_CODE),
    "both by einsum": (
        f"{PRODUCT}\n    {RELU}",
        "scores = F.relu(torch.einsum('bshd,btd->bsht', q, k))",
        UNKNOWN_CODE,
    ),
    "third product": (
        PRODUCT,
        f"q = torch.matmul(q, torch.eye(self.head_dim)[None, None])\n    {PRODUCT}",
        UNKNOWN_CODE,
    ),
    "product after": (
        SUM,
        f"{SUM}\n    torch.matmul(weights.unsqueeze(-2), scores)",
        UNKNOWN_CODE,
    ),
}


@pytest.fixture(autouse=True)
def fresh_probes() -> Iterator[None]:
    """Forget the results of other code; tests here change that of transformers."""
    probe._probe_stock.cache_clear()
    yield
    probe._probe_stock.cache_clear()


def save(directory: Path, **settings: Any) -> Path:
    sizes: dict[str, Any] = {
        "index_topk": NUM,
        "index_n_heads": 16,
        "max_position_embeddings": 10 * NUM,
    }
    return save_tiny_model(directory, "deepseek_v32", seed=1, **{**sizes, **settings})


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_indexer_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, message = CHANGES[change]
    code = textwrap.dedent(inspect.getsource(modeling.DeepseekV32Indexer.forward))
    code = code[code.index("def forward") :].replace("\n        scores", "\n    scores")
    assert old in code
    names = dict(vars(modeling))
    exec(code.replace(old, new), names)
    changed: Callable[..., torch.Tensor] = names["forward"]
    monkeypatch.setattr(modeling.DeepseekV32Indexer, "forward", torch.no_grad()(changed))
    with pytest.raises(ModelError, match=message):
        load_model(save(tmp_path), device="cpu")


AVERAGED = {"indexer_budget": NUM, "indexer_compress_ratio": 4, "indexer_n_heads": 16}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, str]]]] = {
    "glm5_next_on_text": (
        "modeling_glm5_next.Glm5NextTextIndexer",
        {"index_kpool": 4, "index_topk": NUM, "index_n_heads": 16},
        {
            "get_pooled_states": ("self.index_kpool_compress_ape.float()[None, None]", "0"),
            "forward": ("weights.unsqueeze(-2), scores", "weights.unsqueeze(-2), scores.square()"),
            "append_visible_tail": (
                "max_tail_width := self.index_kpool - 1",
                "max_tail_width := 0",
            ),
        },
    ),
    "minimax_m3_vl_on_text": (
        "modeling_minimax_m3_vl.MiniMaxM3VLIndexer",
        {"index_topk_blocks": 4, "index_block_size": 4},
        {"forward": ("block_scores = scores.amax(dim=-1)", "block_scores = scores[..., 0]")},
    ),
    "qwen4_exp": (
        "modeling_qwen4_exp.Qwen4ExpTextQSAIndexer",
        AVERAGED,
        {"forward": ("group_starts = block_token_indices[:, 0]", "group_starts = 0 * X")},
    ),
}
"""By family: the indexer, settings, and changes of its methods."""
CHANGED = [(family, method) for family, (*_, changes) in BLOCKS.items() for method in changes]


@pytest.mark.parametrize(("family", "method"), CHANGED)
def test_a_changed_indexer_of_blocks_is_refused(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, _ = (EXACT | HYBRID)[family]
    if not known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    (name, settings, changes) = BLOCKS[family]
    module_name, class_name = name.split(".")
    package = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.{module_name}")
    stock = getattr(module, class_name)
    old, new = changes[method]
    new = new.replace("X", "block_token_indices[:, 0]")
    code = textwrap.dedent(inspect.getsource(getattr(stock, method)))
    assert old in code
    names = dict(vars(module))
    exec(code.replace(old, new), names)
    monkeypatch.setattr(stock, method, names[method])
    path = save_tiny_model(tmp_path, family, seed=1, max_position_embeddings=10 * NUM, **settings)
    with pytest.raises(ModelError, match=f"{OTHER_KEYS}|on a small tree in .*, the logits differ"):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    "family", ["dots3_note", "glm5_next", "minimax_m3_vl", "qwen4_exp_text", "glm_moe_dsa"]
)
def test_models_of_the_default_sizes_have_small_copies(family: str) -> None:
    """So the load check compares them beyond the keys that a token selects."""
    if not known(family):
        pytest.skip(f"this transformers has no {family}")
    config = CONFIG_MAPPING[family]()
    text = config.get_text_config(decoder=True)
    if family == "minimax_m3_vl":
        text.layer_types = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    if family == "qwen4_exp_text":
        sizes = {
            "budget": 2048,
            "compress_ratio": 16,
            "n_heads": 32,
            "kv_heads": 1,
            "head_dim": 128,
        }
        for name, value in sizes.items():
            setattr(text, f"indexer_{name}", value)
    with torch.device("meta"):
        module = auto_class(config).from_config(config)
    low = low_selection(module.config)
    copies = (build_random_model(type(module), c) for c in iter_small_copies(module.config, low))
    small: Any = next(copy for copy in copies if copy is not None)
    assert dense_length(small.config.get_text_config(decoder=True)) in (8, 16)


def test_copies_have_enough_index_heads() -> None:
    config = CONFIG_MAPPING["deepseek_v32"]()
    for small in iter_small_copies(config, {"index_topk": 8}):
        assert (small.index_n_heads, small.index_topk) == (16, 8)


def index_layers(module: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn.indexer.weights_proj for layer in module.model.layers]


def test_weights_of_index_heads_stay_in_their_type(tmp_path: Path) -> None:
    """transformers casts hidden states to the type of these weights."""
    path = save(tmp_path)
    module = load_model(path, device="cpu", check=False).module
    names = [name for name, _ in iter_fp8_linears(module)]
    assert any(name.endswith("indexer.wq_b") for name in names)
    assert not any("weights_proj" in name for name in names)
    in_fp8 = load_model(path, device="cpu", quantization="fp8").module
    assert {type(part) for part in index_layers(in_fp8)} == {nn.Linear}
    assert isinstance(in_fp8.model.layers[0].self_attn.indexer.wq_b, Fp8Linear)
    replace_with_empty_fp4(module)
    assert {type(part) for part in index_layers(module)} == {nn.Linear}
    assert type(module.model.layers[0].self_attn.indexer.wq_b) is not nn.Linear


def test_what_a_family_keeps_in_float32_is_not_quantized(tmp_path: Path) -> None:
    module = load_model(save(tmp_path), device="cpu", check=False).module
    before = {name for name, _ in iter_fp8_linears(module)}
    module._keep_in_fp32_modules_strict = {"wq_b"}
    left = {name for name, _ in iter_fp8_linears(module)}
    assert before - left == {name for name in before if name.endswith("indexer.wq_b")} != set()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sliding_window", "selects keys and has a window"),
        ("softcap", "selects keys and has a soft"),
    ],
)
def test_windows_and_soft_caps_of_selecting_layers_are_refused(
    option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = modeling.DeepseekV32Attention.forward

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return stock(self, *args, **kwargs, **{option: 4})

    monkeypatch.setattr(modeling.DeepseekV32Attention, "forward", forward)
    with pytest.raises(ModelError, match=message):
        load_model(save(tmp_path), device="cpu", check=False)


def test_a_selecting_model_with_loops_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.model.config.has_loops", lambda _: True)
    with pytest.raises(ModelError, match="combines sparse attention with looped layers"):
        load_model(save(tmp_path), device="cpu", check=False)


def test_a_model_without_a_small_copy_loads_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.model.load_check.build_random_model", lambda *_: None)
    with pytest.warns(
        ModelWarning, match="this deepseek_v32 model .* no small copy of the model can be built"
    ):
        load_model(save(tmp_path), device="cpu")
