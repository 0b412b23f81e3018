"""Checkpoints in packed 4 bits (GPTQ, AWQ, AutoRound): dequantized exactly, or refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import SETTINGS, edit, pack, settings_of, store_exact, store_packed
from quantized_checkpoints import dequantized_weights, draw_greedily
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from treegen.errors import ModelError, ModelWarning
from treegen.model.checkpoint.dequantization import dequantize
from treegen.model.checkpoint.quantization import Packing, quantization_of
from treegen.model.config import load_spec, read_config
from treegen.model.load import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def packing_of(directory: Path) -> Packing:
    found = quantization_of(read_config(directory, directory))
    assert found is not None and found.packing is not None
    return found.packing


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, layout) for family in ("llama", "qwen3_moe") for layout in SETTINGS),
        ("gpt2", "gptq-act-order"),  # its matrices are not transposed
    ],
)
def test_packed_matrices_are_expanded_to_the_bit(family: str, layout: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", family)
    exact = store_packed(tmp_path / "source", tmp_path / "packed", layout)
    store_exact(tmp_path / "source", tmp_path / "plain", exact, torch.float32)
    assert len(exact) >= 8
    message = "4 bits were dequantized to float32: .*in files"
    for name, weight, other in dequantized_weights(
        tmp_path / "packed", tmp_path / "plain", message
    ):
        assert torch.equal(weight, other), name


@pytest.mark.parametrize("layout", SETTINGS)
def test_greedy_tokens_are_those_of_the_expanded_model(layout: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    exact = store_packed(tmp_path / "source", tmp_path / "packed", layout)
    store_exact(tmp_path / "source", tmp_path / "plain", exact, torch.float32)
    with pytest.warns(ModelWarning, match="dequantized"):
        found = draw_greedily(tmp_path / "packed")
    assert found == draw_greedily(tmp_path / "plain")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_once(scales: torch.dtype, dtype: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    exact = store_packed(tmp_path / "source", tmp_path / "packed", "gptq", scales=scales)
    with pytest.warns(ModelWarning, match=f"dequantized to {dtype}"):
        model = load_model(tmp_path / "packed", device="cpu", dtype=dtype)
    found = dict(model.module.named_parameters())
    assert len(exact) == 14
    for name, value in exact.items():
        assert torch.equal(found[name], value.to(DTYPES[dtype])), name


def test_the_line_tells_the_bytes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_packed(tmp_path / "source", tmp_path / "packed", "awq")
    with pytest.warns(ModelWarning) as record:
        model = load_model(tmp_path / "packed", device="cpu")
    before = (tmp_path / "packed" / "model.safetensors").stat().st_size
    after = sum(4 * weight.numel() for weight in model.module.parameters())
    assert str(record[0].message).endswith(
        f"AWQ's 4 bits were dequantized to float32: {before / 1024:.1f} KiB in files, "
        f"{after / 1024:.1f} KiB dequantized"
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_matrix_is_expanded_to_the_bit(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    layout = [*SETTINGS][seed % len(SETTINGS)]
    inputs, outputs = (8 * int(each) for each in generator.integers(1, 12, 2))
    parts, exact = pack(inputs, outputs, layout, generator, torch.float16)
    save_tiny_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": settings_of(layout)}))
    found = dequantize(packing_of(tmp_path), **parts)
    assert torch.equal(found.double(), exact)


def test_a_zero_of_zero_that_borrowed_from_the_next_is_read() -> None:
    # Stored in GPTQ's first format: 0x11111111 less than the word 0x8f000120.
    word = torch.tensor([[0x8F000120 - 0x11111111]], dtype=torch.int64).to(torch.int32)
    stored = torch.full((1, 8), 0x11111111, dtype=torch.int32)
    scales = torch.ones(1, 8)
    found = dequantize(Packing("gptq", -1), stored, word, scales)
    assert (1 - found)[0].tolist() == [0, 2, 1, 0, 0, 0, 15, 8]
    assert torch.equal(found, (1 - torch.tensor([0, 2, 1, 0, 0, 0, 15, 8.0])).expand(8, 8))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("gptq", {"bits": 8}, r"gptq weights with bits 8 .*use the original"),
        ("gptq", {"bits": 3}, r"bits 3 "),
        ("gptq", {"bits": None}, r"bits None "),
        ("gptq", {"group_size": 0}, r"group_size 0 "),
        ("gptq", {"group_size": "x"}, r"group_size 'x' "),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            r"the layout marlin \(expected gptq or gptq_v2\)",
        ),
        ("gptq", {"pack_dtype": "int16"}, r"pack_dtype other than int32"),
        ("gptq", {"rotation": "hadamard"}, r"weights with rotation"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"separate settings for \+:"),
        ("gptq", {"dynamic": {"x": {"group_size": 8}}}, r"separate settings for x"),
        ("gptq", {"dynamic": ["x"]}, r"dynamic \"\['x'\]\" \(expected an object of layers\)"),
        ("gptq", {"dynamic": {"x": 8}}, r"dynamic '8' for x \(expected an object\)"),
        ("awq", {"version": "gemv"}, r"awq weights with the layout gemv \(expected gemm\)"),
        ("awq", {"version": "marlin"}, r"the layout marlin"),
        ("round-gptq", {"packing_format": "auto_round"}, r"the layout auto_round \(expected"),
        ("round-gptq", {"packing_format": None}, r"the layout unnamed"),
        ("round-gptq", {"data_type": "mx_fp"}, r"a data_type other than int"),
        ("round-awq", {"extra_config": {"a.b": {"bits": 8}}}, r"separate settings for a\.b"),
    ],
)
def test_other_packings_are_refused_by_name(
    layout: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "source")
    store_packed(tmp_path / "source", tmp_path / "packed", layout)
    edit(tmp_path / "packed", **changes)
    (tmp_path / "packed" / "model.safetensors").unlink()  # before a weight is read
    with pytest.raises(ModelError, match=message):
        load_spec(tmp_path / "packed")


def test_modules_left_out_are_no_other_packing(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_packed(tmp_path / "source", tmp_path / "packed", "round-gptq")
    left = {"lm_head": {"bits": 16, "group_size": 64}, "a": {"bits": 4, "sym": False}}
    edit(tmp_path / "packed", extra_config=left, dynamic={"-:.*norm.*": {}})
    assert packing_of(tmp_path / "packed") == Packing("gptq", 16)


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales", "g_idx", "cut", "beyond"])
def test_tensors_that_do_not_go_together_are_refused(missing: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_packed(tmp_path / "source", tmp_path / "packed", "gptq-act-order")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj"
    if missing == "cut":
        tensors[f"{name}.scales"] = tensors[f"{name}.scales"][1:].contiguous()
    elif missing == "beyond":
        tensors[f"{name}.g_idx"] += 1
    else:
        del tensors[f"{name}.{missing}"]
    save_file(tensors, file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ModelError, match=rf"{name}\.weight cannot be built"):
            load_model(tmp_path / "packed", device="cpu")
