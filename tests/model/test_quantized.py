"""Quantized checkpoints: FP8 kept or expanded, other methods expanded or refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import edit_config
from packed_checkpoints import INT4, store_in_int4
from quantized_checkpoints import SETTINGS, dequantized_weights, expanded, store_in_fp8
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from treegen import LLM, Node, SamplingParams
from treegen.errors import ModelError, ModelWarning
from treegen.evals.model import load_model_info
from treegen.model import weights
from treegen.model.checkpoint import quantization
from treegen.model.checkpoint.quantization import FP8_METHODS
from treegen.model.config import load_spec
from treegen.model.linear.fp8 import Fp8Linear
from treegen.model.linear.fp8_checkpoint import requantize_per_row
from treegen.model.linear.fp8_experts import Fp8Experts, rounding_experts
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.options import EngineOptions
from treegen.ops.attention.types import FP8

# One scale for each output holds what they store; in MXFP8 scales differ by powers of two.
EXACT = ("tensor", "channel", "modelopt", "mxfp8")
TREE = Node("Q: 1 + 1?\nA:", children=[Node(" 2", samples=3), Node(" two", samples=2)])


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: part.weight.float() * part.scale[:, None]
        for name, part in model.module.named_modules()
        if isinstance(part, Fp8Linear)
    }


def drawn(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    return [list(c.tokens) for c in llm.run(TREE, params).completions]


@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_is_expanded_where_it_cannot_be_multiplied(
    family: str, layout: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "source", family)
    plain = store_in_fp8(tmp_path / "source", tmp_path / "fp8", layout)
    message = "in .*FP8 were dequantized to float32"
    for name, weight, other in dequantized_weights(tmp_path / "fp8", plain, message):
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, other, msg=name)


@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_stays_as_it_is_stored(dtype: str, layout: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", layout)
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(tmp_path / "fp8", device="cpu", dtype=dtype, quantization="fp8")
    messages = [str(each.message) for each in caught if each.category is ModelWarning]
    found = weights_of(model)
    assert len(found) == 14
    for name, weight in found.items():
        scale = f"{name}.weight_scale"
        grid = stored[scale] if scale in stored else stored[f"{scale}_inv"]
        want = expanded(stored[f"{name}.weight"], grid)
        if layout in EXACT:
            assert torch.equal(weight, want)
        else:
            assert ((weight - want).abs() <= want.abs() / 16 + 1e-4).all()
    if layout in EXACT:
        assert messages == []
        return
    assert "14 were rounded from block scales" in messages[0]
    share = float(messages[0].rpartition("error: ")[2].rstrip("%)"))
    assert 0.5 < share < 4.0


def test_it_finds_matrices_in_several_files(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", "channel")
    whole = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(whole)
    save_file(tensors, tmp_path / "fp8" / "consolidated.safetensors")  # a second copy of all
    files = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    # A matrix and its scales need not lie in one file.
    place = {name: files["scale" in name] for name in tensors}
    for file in files:
        own = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(own, tmp_path / "fp8" / file, {"format": "pt"})
    whole.unlink()
    index = tmp_path / "fp8" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": place}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(tmp_path / "fp8", device="cpu", quantization="fp8")
    assert len(weights_of(model)) == 14


@pytest.mark.parametrize("layout", ["channel", "fine"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_stay_as_they_are_stored(family: str, layout: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", family)
    plain = store_in_fp8(tmp_path / "source", tmp_path / "fp8", layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(tmp_path / "fp8", device="cpu", quantization="fp8")
    messages = [str(each.message) for each in caught if each.category is ModelWarning]
    # 4 of attention and 3 x 4 of experts, in each of two layers
    assert messages == [] if layout == "channel" else "32 matrices stay" in messages[0]
    assert not any("others were dequantized" in each for each in messages)
    want = load_model(plain, device="cpu").module
    found = [part for part in model.module.modules() if isinstance(part, Fp8Experts)]
    assert len(found) == 2
    for part, (_, other) in zip(found, rounding_experts(want), strict=True):
        for name in other[1:]:
            weight = getattr(part, name).float() * getattr(part, f"{name}_scale")[..., None]
            stored = getattr(other.module, name)
            off = 0 if layout == "channel" else stored.abs() / 16 + 1e-4
            assert ((weight - stored).abs() <= off + stored.abs() * 1e-6).all()


def test_experts_in_fp8_that_cannot_be_multiplied_are_expanded_and_counted(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", "qwen3_moe", moe_intermediate_size=24)
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", "channel")
    with pytest.warns(ModelWarning, match=r"8 matrices stay .*; 24 others were dequantized"):
        model = load_model(tmp_path / "fp8", device="cpu", quantization="fp8")
    assert len(weights_of(model)) == 8


def test_blocks_of_an_output_get_the_scale_of_the_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 48, generator=generator).to(FP8)
    grid = torch.rand(2, 3, generator=generator) + 0.1
    rounded, scale_N, changed, whole = requantize_per_row(weight, grid)
    want = expanded(weight, grid).double()
    got = rounded.double() * scale_N.double()[:, None]
    assert torch.equal(scale_N, grid.amax(1).repeat_interleave(16))
    assert changed == pytest.approx(float((got - want).square().sum()), rel=1e-4)
    assert whole == pytest.approx(float(want.square().sum()), rel=1e-5)
    largest = grid.argmax(1)
    for block, at in enumerate(largest):
        rows, columns = slice(block * 16, block * 16 + 16), slice(at * 16, at * 16 + 16)
        assert torch.equal(rounded[rows, columns].float(), weight[rows, columns].float())
    zeros, scales, _, _ = requantize_per_row(weight, torch.zeros(2, 3))
    assert zeros.float().eq(0).all() and scales.eq(1).all()


def test_an_fp8_checkpoint_draws_as_the_expanded_one_does(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    plain = store_in_fp8(tmp_path / "source", tmp_path / "fp8", "channel")
    with pytest.warns(ModelWarning, match="dequantized"):
        llm = LLM(str(tmp_path / "fp8"), memory="8MiB", device="cpu")
    assert drawn(llm) == drawn(LLM(str(plain), memory="8MiB", device="cpu"))


@pytest.mark.parametrize(
    ("quantization", "capable", "stays"),
    [(None, True, True), (None, False, False), ("none", True, False), ("fp8", False, True)],
)
def test_a_run_names_fp8_where_it_computes_in_it(
    quantization: str | None,
    capable: bool,
    stays: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", "tensor")
    monkeypatch.setattr(weights, "can_multiply", lambda device: capable)
    options = {"model": str(tmp_path / "fp8"), "quantization": quantization, "device": "cpu"}
    model_info = load_model_info(EngineOptions(**options))  # type: ignore[arg-type]
    assert model_info.quantization == ("fp8" if stays else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        model = load_model(tmp_path / "fp8", device="cpu", quantization=quantization)
    assert bool(weights_of(model)) is stays


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["channel", "fine"])
def test_a_gpu_multiplies_fp8_as_it_is_stored(layout: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", dtype=torch.bfloat16)
    plain = store_in_fp8(tmp_path / "source", tmp_path / "fp8", layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        llm = LLM(str(tmp_path / "fp8"), memory="64MiB", device="cuda")
    assert len(weights_of(llm.model)) == 14
    assert len(weights_of(llm.model)) == 14
    pairs = [("Q: 1 + 1 is what?", " It is 2.")]
    found = np.array(llm.score(pairs)[0].logprobs)
    want = np.array(LLM(str(plain), memory="64MiB", device="cuda").score(pairs)[0].logprobs)
    assert not np.array_equal(found, want)  # it is not expanded
    assert np.abs(found - want).mean() < 0.3
    assert len(drawn(llm)) == 5


def test_divided_models_expand(tmp_path: Path) -> None:
    options = EngineOptions(model=str(tmp_path), tensor_parallel_size=2)
    assert options.loading()["quantization"] == "none"
    options = EngineOptions(model=str(tmp_path), reproducible=True)
    assert options.loading()["quantization"] is None


def test_fp8_that_nothing_tells_of_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_in_fp8(tmp_path / "source", tmp_path / "fp8", "tensor")
    edit_config(tmp_path / "fp8", quantization_config=None)
    with pytest.raises(ModelError, match=r"has weights in FP8 .* no quantization_config"):
        load_model(tmp_path / "fp8", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transform_config": {"config_groups": {"a": 1}}}, "weights with rotation"),
        ({"quant_method": "unheard-of"}, r"\(unheard-of\) are not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, r"\(modelopt\) are not"),
    ],
)
def test_layouts_that_are_not_read_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, quantization_config={**SETTINGS["channel"], **changes})
    with pytest.raises(ModelError, match=message):
        load_spec(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path)
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    for settings, extra in ((SETTINGS["fine"], "fp8"), (INT4, "compressed-tensors")):
        edit_config(tmp_path, quantization_config=settings)
        with pytest.raises(ModelError, match=rf"pip install '\.\[{extra}\]'"):
            load_spec(tmp_path)


def test_four_bit_integers_of_compressed_tensors_are_expanded(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    want = store_in_int4(save_tiny_model(tmp_path / "source"), tmp_path / "packed")
    with pytest.warns(ModelWarning, match="4 bits were dequantized to float32"):
        model = load_model(tmp_path / "packed", device="cpu")
    found = dict(model.module.named_parameters())
    assert len(want) == 14
    for name, weight in want.items():
        torch.testing.assert_close(found[name].data, weight)


def test_every_fp8_method_is_tested() -> None:
    assert {str(settings["quant_method"]) for settings in SETTINGS.values()} == {*FP8_METHODS}
