"""Checkpoints in NVFP4, alone and with FP8: dequantized exactly, kept in 4 bits, or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4_checkpoints import LAYOUTS, rounded, store_in_fp4
from packed_checkpoints import edit, store_exact
from quantized_checkpoints import dequantized_weights, draw_greedily
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from treegen.bench.shapes import build_model, shape_of
from treegen.errors import ModelError, ModelWarning
from treegen.model.checkpoint.fp4 import Fp4Matrix, dequantize_stored, read_quant_config
from treegen.model.checkpoint_report import inspect_checkpoint
from treegen.model.linear.fp4 import Fp4Experts, Fp4Linear
from treegen.model.linear.fp4_checkpoint import KeptMatrices
from treegen.model.linear.fp8 import Fp8Linear
from treegen.model.load import load_model
from treegen.model.options import EngineOptions


def store(path: Path, family: str, layout: str, **how: Any) -> None:
    """Write a checkpoint in NVFP4, `packed`, and the same expanded, `plain`."""
    save_tiny_model(path / "source", family)
    exact = store_in_fp4(path / "source", path / "packed", layout, **how)
    store_exact(path / "source", path / "plain", exact, torch.float32)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "ernie4_5_vl_moe_on_text"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_are_expanded_to_the_bit(
    layout: str, family: str, mixed: bool, tmp_path: Path
) -> None:
    store(tmp_path, family, layout, mixed=mixed)
    stores = "NVFP4 and FP8" if mixed else "NVFP4"
    message = f"{stores} were dequantized to float32: .*in files"
    for name, got, want in dequantized_weights(tmp_path / "packed", tmp_path / "plain", message):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_are_those_of_the_expanded_model(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, "qwen3", layout)
    want = draw_greedily(tmp_path / "plain")
    with pytest.warns(ModelWarning, match="dequantized"):
        assert draw_greedily(tmp_path / "packed") == want
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert draw_greedily(tmp_path / "packed", quantization="nvfp4") == want


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_matrices_compute_what_the_expanded_ones_do(
    layout: str, family: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, family, layout, mixed=mixed)
    plain = load_model(tmp_path / "plain", device="cpu")
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if mixed else "error", ModelWarning)
        model = load_model(tmp_path / "packed", device="cpu", quantization="nvfp4")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    names = [name for name in stored if name.endswith(("weight_scale_2", "weight_global_scale"))]
    linears = [part for part in model.module.modules() if isinstance(part, Fp4Linear)]
    experts: list[Any] = [part for part in model.module.modules() if isinstance(part, Fp4Experts)]
    if not mixed:
        num = sum(3 * len(part.gate_up_proj) for part in experts)
        assert len(linears) + num == len(names)
    assert linears and (family == "llama" or mixed or len(experts) == 2)
    assert all(part.weight.dtype == torch.uint8 for part in linears)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    from treegen.model.load import patch_module

    with patch_module(model.module), patch_module(plain.module):
        for part in (model.module, plain.module):
            part.set_attn_implementation("eager")
        got, want = model.module(ids).logits, plain.module(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_layers_in_fp8_stay_in_fp8_if_those_in_nvfp4_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, "llama", "modelopt", mixed=True)
    monkeypatch.setattr("treegen.model.weights.can_multiply", lambda device: True)
    line = "4 matrices stay in FP8; matrices in NVFP4 were dequantized to float32: .* in files, "
    with pytest.warns(ModelWarning, match=line) as record:
        module = load_model(tmp_path / "packed", device="cpu").module
    assert len(record) == 1
    assert sum(isinstance(part, Fp8Linear) for part in module.modules()) == 4
    assert not any(weight.dtype == torch.uint8 for weight in module.parameters())
    options = EngineOptions(model=str(tmp_path / "packed"), device="cpu")
    assert set(inspect_checkpoint(options).matrices) == {"NVFP4 dequantized", "FP8 kept"}


@pytest.mark.parametrize(("shape", "linears", "experts"), [("tiny", 14, 0), ("tiny-delta", 25, 4)])
def test_a_shape_is_built_in_4_bits(shape: str, linears: int, experts: int) -> None:
    model, _ = build_model(shape_of(shape), device="cpu", quantization="nvfp4")
    parts = [*model.module.modules()]
    assert sum(isinstance(part, Fp4Linear) for part in parts) == linears
    assert sum(isinstance(part, Fp4Experts) for part in parts) == experts


def test_tied_embeddings_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "source", tie_word_embeddings=True)
    store_in_fp4(tmp_path / "source", tmp_path / "packed", "modelopt")
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    module = load_model(tmp_path / "packed", device="cpu", quantization="nvfp4").module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.lm_head.weight.dtype == torch.float32


def test_settings_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp4(tmp_path / "source", tmp_path / "packed", "modelopt", in_file=True)
    with pytest.warns(ModelWarning, match="NVFP4 were dequantized"):
        load_model(tmp_path / "packed", device="cpu")
    (tmp_path / "packed" / "hf_quant_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        load_model(tmp_path / "packed", device="cpu")


def test_expansion_is_that_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    torch.manual_seed(0)
    parts, _ = rounded(torch.randn(48, 64), "compressed-tensors")
    numbers = helpers.unpack_fp4_from_uint8(parts["weight_packed"], 48, 64, dtype=torch.float32)
    scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    want = (numbers.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1)
    assert torch.equal(dequantize_stored(parts), want)


def edit_tensors(directory: Path, **changed: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for end, value in changed.items():
        name = f"model.layers.1.mlp.up_proj.{end}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file, {"format": "pt"})


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_scale": None}, "expected the three tensors"),
        ({"weight_scale_2": None}, "expected the three tensors"),
        (
            {"weight_scale": torch.ones(48, 1).to(E4M3)},
            r"must be F8_E4M3 \[48, 2\], got F8_E4M3 \[48, 1\]",
        ),
        ({"weight_scale": torch.ones(48, 2)}, "got F32"),
        (
            {"weight": torch.ones(48, 16, 1, dtype=torch.uint8)},
            "weight must be a matrix of type U8",
        ),
        ({"weight_scale_2": torch.ones(48)}, "must be a single floating-point number"),
        ({"pre_quant_scale": torch.ones(32)}, "pre_quant_scale"),
        (
            {"weight_scale": None, "weight_scale_2": None, "weight": torch.ones(48, 32)},
            "is stored in NVFP4, but its tensors are not quantized",
        ),
        ({"weight_scale_2": torch.tensor(0.0)}, "up_proj"),
        ({"weight_scale_2": torch.tensor(float("nan"))}, "up_proj"),
        ({"weight_scale": torch.full((48, 2), -1.0).to(E4M3)}, "up_proj"),
        ({"weight_scale": torch.full((48, 2), float("nan")).to(E4M3)}, "up_proj"),
    ],
)
def test_tensors_that_are_no_matrix_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp4(tmp_path / "source", tmp_path / "packed", "modelopt", mixed=True)
    edit_tensors(tmp_path / "packed", **changed)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "packed", device="cpu")


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "modelopt"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}}, "modelopt"),
        ("modelopt", {"exclude_modules": 7}, "must list layer names"),
        (
            "compressed-tensors",
            {"ignore": ["re:(a*)*$", "re:("]},
            "not a regular expression",
        ),
        (
            "compressed-tensors",
            {"ignore": ["re:((.*)*)*X"]},
            "take more than",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    layout: str,
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treegen.common.bounded.patterns.MATCH_SECONDS", 1.0)
    save_tiny_model(tmp_path / "source")
    store_in_fp4(tmp_path / "source", tmp_path / "packed", layout)
    edit(tmp_path / "packed", **fields)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "packed", device="cpu")


def test_a_layer_in_another_format_than_its_group_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp4(tmp_path / "source", tmp_path / "packed", "compressed-tensors", mixed=True)
    file = tmp_path / "packed" / "config.json"
    text = file.read_text()
    file.write_text(text.replace("re:.*(o|down)_proj$", "re:.*o_proj$"))
    with pytest.raises(
        ModelError, match="down_proj is stored in NVFP4, but its tensors are in FP8"
    ):
        load_model(tmp_path / "packed", device="cpu")


@pytest.mark.parametrize("target", ["re:.*", "re:model.layers.*", "re:.*(proj|norm)$"])
def test_a_target_that_matches_norms_too_means_matrices(target: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp4(tmp_path / "source", tmp_path / "packed", "compressed-tensors")
    file = tmp_path / "packed" / "config.json"
    ignored = ["lm_head", "model.embed_tokens"]
    text = file.read_text().replace('["Linear"]', json.dumps([target]))
    file.write_text(text)
    edit(tmp_path / "packed", ignore=ignored)
    with pytest.warns(ModelWarning, match="NVFP4 were dequantized"):
        load_model(tmp_path / "packed", device="cpu", check=False)


def test_the_report_tells_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path, "qwen3_moe", "modelopt")
    options = EngineOptions(model=str(tmp_path / "packed"), device="cpu", dtype="bfloat16")
    found = inspect_checkpoint(options)
    assert found.stored == "NVFP4" and not found.quantization
    assert found.weight_bytes == 2 * found.spec.num_weights  # type: ignore[union-attr]
    assert "NVFP4 dequantized: " in str(found)
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    found = inspect_checkpoint(options)
    assert found.quantization == "nvfp4" and "matrices in nvfp4" in str(found)
    assert "NVFP4 kept: 32 matrices, " in str(found) and found.document["matrices"]
    with pytest.warns(ModelWarning, match="weights stay in NVFP4"):
        module = load_model(tmp_path / "packed", device="cpu", dtype="bfloat16").module
    real = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    assert abs(found.weight_bytes - real) < 0.1 * real


def test_settings_of_stored_keys_alone_are_no_quantization(tmp_path: Path) -> None:
    settings = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert read_quant_config(tmp_path) is None


def test_a_layer_of_another_shape_than_the_stored_matrix_is_not_kept() -> None:
    """It is made of several stored matrices, or of a part of one."""
    with torch.device("meta"):
        module = torch.nn.ModuleDict({"q": torch.nn.Linear(32, 64, bias=False)})
    kept = KeptMatrices()
    kept.start(module)

    def matrix(outputs: int) -> Fp4Matrix:
        scale = torch.ones(outputs, 2).to(torch.float8_e4m3fn)
        return Fp4Matrix(torch.zeros(outputs, 16, dtype=torch.uint8), scale, torch.ones(outputs))

    assert not kept.keep("q.weight", [[matrix(192)]])
    assert not kept.keep("q.weight", [[matrix(32)], [matrix(32)]])
    assert kept.keep("q.weight", [[matrix(64)]])
