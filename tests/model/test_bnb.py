"""Checkpoints in bitsandbytes' 4 and 8 bits: dequantized exactly, or refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bnb_checkpoints import SETTINGS, pack, store_bnb
from packaging.version import Version
from packed_checkpoints import edit, store_exact
from quantized_checkpoints import dequantized_weights, draw_greedily
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from treegen.errors import ModelError, ModelWarning
from treegen.model.checkpoint.dequantization import dequantize_4bit, dequantize_8bit
from treegen.model.config import load_spec
from treegen.model.load import load_model

OLD = Version(transformers.__version__) < Version("5.21")
PROJECTION = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("llama", layout) for layout in SETTINGS),
        *(("qwen3_moe", layout) for layout in ("fp4-double", "int8")),
        *(("gpt2", layout) for layout in ("nf4", "int8")),  # whose matrices are transposed
    ],
)
def test_matrices_are_expanded_to_the_bit(family: str, layout: str, tmp_path: Path) -> None:
    if layout == "nf4-double-bfloat16" and OLD:
        pytest.skip("this transformers widens the stored numbers to float32; an error says so")
    save_tiny_model(tmp_path / "source", family)
    exact = store_bnb(tmp_path / "source", tmp_path / "packed", layout)
    store_exact(tmp_path / "source", tmp_path / "plain", exact, torch.float32)
    bits = 8 if layout == "int8" else 4
    assert len(exact) >= 8
    message = f"{bits} bits were dequantized to float32: .*in files"
    for name, weight, other in dequantized_weights(
        tmp_path / "packed", tmp_path / "plain", message, check=False
    ):
        assert torch.equal(weight, other), name
    if family == "llama":
        with pytest.warns(ModelWarning, match="dequantized"):
            found = draw_greedily(tmp_path / "packed", check=False)
        assert found == draw_greedily(tmp_path / "plain", check=False)


def test_numbers_are_rounded_once_to_the_type_to_compute_in(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    exact = store_bnb(tmp_path / "source", tmp_path / "packed", "nf4-double-bfloat16")
    with pytest.warns(ModelWarning, match="dequantized to bfloat16"):
        model = load_model(tmp_path / "packed", device="cpu", dtype="bfloat16", check=False)
    found = dict(model.module.named_parameters())
    assert len(exact) == 14
    for name, value in exact.items():
        assert torch.equal(found[name], value.bfloat16()), name


@pytest.mark.parametrize("seed", range(60))
def test_any_matrix_is_expanded_to_the_bit(seed: int) -> None:
    generator = np.random.default_rng(seed)
    layout = [*SETTINGS][seed % len(SETTINGS)]
    rows, columns = (int(each) for each in generator.integers(1, 90, 2))
    shape = (2 * rows, 2 * columns) if layout.endswith("bfloat16") else (rows, columns)
    block = 2 ** int(generator.integers(1, 13))  # with a block that is not full, most of the time
    parts, exact = pack(shape, layout, generator, block)
    found = (dequantize_8bit if layout == "int8" else dequantize_4bit)(parts)
    assert torch.equal(found, exact)


def by_library(stored: torch.Tensor, state: Any) -> torch.Tensor:
    """What bitsandbytes makes of a matrix in 4 bits.

    Where rows are shorter than blocks, its code for CPUs (0.50, AVX512) takes other scales than
    its code for any device, so such a matrix is given as one row.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    shape = state.shape
    if shape[-1] < state.blocksize:
        state.shape = torch.Size((1, shape.numel()))
    found: torch.Tensor = functional.dequantize_4bit(stored, state)
    state.shape = shape
    return found.reshape(shape)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_the_librarys(kind: str, double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    for block in (32, 64, 128, 512, 4096):
        for shape in ((24, 40), (7, 9), (1, 1), (128, 130), (32, 32), (6, 512)):
            for storage in (torch.uint8, torch.float32):
                if storage != torch.uint8 and (shape[0] * shape[1]) % 8:
                    continue
                stored, state = functional.quantize_4bit(
                    torch.randn(shape),
                    blocksize=block,
                    compress_statistics=double,
                    quant_type=kind,
                    quant_storage=storage,
                )
                parts = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
                found = dequantize_4bit({"weight": stored, **parts})
                assert torch.equal(found, by_library(stored, state)), (block, shape)


def test_eight_bits_are_the_librarys() -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    for shape in ((24, 40), (7, 9), (1, 1), (130, 3)):
        stored, largest, _ = bnb.int8_vectorwise_quant(torch.randn(shape, dtype=torch.float16))
        found = dequantize_8bit({"weight": stored, "SCB": largest})
        assert torch.equal(found, bnb.int8_vectorwise_dequant(stored, largest))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_that_transformers_has_saved_is_the_one_that_it_expands(
    bits: int, family: str, tmp_path: Path
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    save_tiny_model(tmp_path / "source", family)
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    made.save_pretrained(tmp_path / "packed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "packed" / name).write_text((tmp_path / "source" / name).read_text())
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, device_map="cpu"
    )
    with pytest.warns(ModelWarning, match=rf"bitsandbytes' {bits} bits were dequantized"):
        model = load_model(tmp_path / "packed", device="cpu", dtype="float32", check=False)
    packed = 0
    for name, weight in stock.named_parameters():
        actual, want = model.module.get_parameter(name), weight
        if hasattr(weight, "quant_state"):
            want = by_library(weight.data, weight.quant_state)
        elif weight.dtype == torch.int8:
            want = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        packed += want is not weight
        # GPT-2's matrices are stored as those of linear layers.
        turned = family == "gpt2" and want is not weight
        assert torch.equal(actual.T if turned else actual, want), name
    assert packed == {"llama": 14, "gpt2": 8}[family]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": False}, "load_in_4bit and load_in_8bit both set or both unset"),
        ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit both set or both unset"),
        ({"bnb_4bit_quant_type": "af4"}, r"bnb_4bit_quant_type 'af4' \(expected nf4 or fp4\)"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "source")
    store_bnb(tmp_path / "source", tmp_path / "packed", "nf4")
    edit(tmp_path / "packed", **changes)
    (tmp_path / "packed" / "model.safetensors").unlink()  # before a weight is read
    with pytest.raises(
        ModelError, match=f"bitsandbytes weights with {message} are not supported; .*original"
    ):
        load_spec(tmp_path / "packed")


def test_a_configuration_from_before_methods_had_names_is_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_bnb(tmp_path / "source", tmp_path / "packed", "int8")
    edit(tmp_path / "packed", quant_method=None)
    with pytest.warns(ModelWarning, match="bitsandbytes' 8 bits"):
        load_model(tmp_path / "packed", device="cpu", check=False)


@pytest.mark.parametrize(
    "broken",
    ["absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state", "torn", "cut"],
)
def test_four_bits_that_do_not_go_together_are_refused(broken: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_bnb(tmp_path / "source", tmp_path / "packed", "fp4-double")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    state = f"{PROJECTION}.weight.quant_state.bitsandbytes__fp4"
    if broken == "torn":
        tensors[state] = tensors[state][:-3].contiguous()
    elif broken == "cut":
        tensors[f"{PROJECTION}.weight"] = tensors[f"{PROJECTION}.weight"][1:].contiguous()
    else:
        del tensors[state if broken == "quant_state" else f"{PROJECTION}.weight.{broken}"]
    refused(file, tensors)


@pytest.mark.parametrize("broken", ["SCB", "cut", "order"])
def test_eight_bits_that_do_not_go_together_are_refused(broken: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source")
    store_bnb(tmp_path / "source", tmp_path / "packed", "int8")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    if broken == "cut":
        tensors[f"{PROJECTION}.SCB"] = tensors[f"{PROJECTION}.SCB"][1:].contiguous()
    elif broken == "order":
        tensors[f"{PROJECTION}.weight_format"] += 2
    else:
        del tensors[f"{PROJECTION}.SCB"], tensors[f"{PROJECTION}.weight_format"]
    refused(file, tensors)


def refused(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ModelError, match=rf"{PROJECTION}\.weight cannot be built"):
            load_model(file.parent, device="cpu")
