"""Tiny checkpoints whose matrices are stored in FP8, in the layouts that tools write."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treegen import LLM, Node, SamplingParams
from treegen.errors import ModelWarning
from treegen.model.load import load_model

BLOCK = 16
_TREE = Node("Q: 1 + 1?\nA:", children=[Node(" 2", samples=2), Node(" two, for", samples=1)])
_E4M3_MAX = 448.0
_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": _GROUP},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "tensor": _COMPRESSED,
    "channel": _COMPRESSED,
    "block": _COMPRESSED,
    "fine": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, BLOCK]},
}
"""The quantization_config of each layout."""


def dequantized_weights(
    packed: Path, plain: Path, message: str, **options: Any
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The weights of a quantized model, expanded, with those of the same model that is not.

    message: what the one warning says.
    """
    with pytest.warns(ModelWarning, match=message) as record:
        model = load_model(packed, device="cpu", **options)
    assert len(record) == 1  # nothing of it is unused
    want = load_model(plain, device="cpu", **options)
    for (name, weight), other in zip(
        model.module.named_parameters(), want.module.parameters(), strict=True
    ):
        yield name, weight, other


def draw_greedily(path: Path, **options: Any) -> list[list[int]]:
    """Tokens of the samples of a small tree."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    llm = LLM(str(path), memory="8MiB", device="cpu", **options)
    return [list(c.tokens) for c in llm.run(_TREE, params).completions]


def expanded(weight: Tensor, grid: Tensor) -> Tensor:
    """A matrix [N, K] in FP8 times its scales [n, k] or [1], in float32."""
    scale = grid if grid.dim() == 2 else grid.reshape(1, 1)
    if scale.dtype == torch.uint8:
        scale = (scale.float() - 127).exp2()
    rows, width = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    return weight.float() * scale.repeat_interleave(rows, 0).repeat_interleave(width, 1)


def _scale(value: Tensor, layout: str) -> Tensor:
    if layout in ("tensor", "modelopt"):
        whole: Tensor = value.abs().max() / _E4M3_MAX
        return whole[None] if layout == "tensor" else whole
    if layout == "channel":
        return value.abs().amax(1, keepdim=True) / _E4M3_MAX
    high = 1 if layout == "mxfp8" else BLOCK
    blocks = value.unflatten(0, (-1, high)).unflatten(2, (-1, BLOCK))
    scale: Tensor = blocks.abs().amax((1, 3)) / _E4M3_MAX
    return (scale.log2().ceil() + 127).to(torch.uint8) if layout == "mxfp8" else scale


def store_in_fp8(source: Path, target: Path, layout: str) -> Path:
    """Copy a checkpoint with its projections in FP8; returns one with the same numbers expanded."""
    plain = target.with_name(f"{target.name}-plain")
    shutil.copytree(source, target)
    shutil.copytree(source, plain)
    tensors, numbers = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        inner = name.endswith(".weight") and ("_proj" in name or ".experts." in name)
        tensors[name] = numbers[name] = value
        if not inner or value.dim() != 2:
            continue
        grid = _scale(value.float(), layout)
        ones = torch.ones_like(value, dtype=torch.float32)
        tensors[name] = (
            (value / expanded(ones, grid)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        )
        tensors[f"{name}_scale_inv" if layout in ("fine", "mxfp8") else f"{name}_scale"] = grid
        numbers[name] = expanded(tensors[name], grid).to(value.dtype)
        if layout in ("tensor", "modelopt"):
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.02])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    file = target / "config.json"
    settings = {**json.loads(file.read_text()), "quantization_config": SETTINGS[layout]}
    file.write_text(json.dumps(settings))
    return plain
