"""Tiny checkpoints in packed 4 bits, written and expanded number by number from the formats."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of AWQ's words hold, from the lowest."""
SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": False},
    "gptq-symmetric": {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True},
    "gptq-act-order": {"quant_method": "gptq", "desc_act": True, "sym": False},
    "gptq-columns": {"quant_method": "gptq", "group_size": -1, "sym": False},
    "gptq-v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False},
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True},
    "round-gptq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "round-awq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
}
"""What each layout adds to quantization_config."""
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*kv_a_proj_with_mqa$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
}
"""The quantization_config of 4 bits of compressed-tensors."""


def settings_of(layout: str) -> dict[str, Any]:
    return {"bits": 4, "group_size": GROUP, **SETTINGS[layout]}


def _packed(numbers: np.ndarray, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [R, C / 8] of integers [R, C]: the i-th four bits hold the number at places[i]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.int64)
    for i, place in enumerate(places):
        words += numbers[:, place::8].astype(np.int64) << (4 * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def pack(
    inputs: int, outputs: int, layout: str, generator: np.random.Generator, scales: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random packed matrix, and the matrix [K, N] in float64."""
    size = settings_of(layout)["group_size"]
    size = inputs if size < 0 else size
    groups = -(-inputs // size)
    stored = generator.integers(0, 16, (inputs, outputs))
    first = layout.startswith(("gptq", "round-gptq")) and layout != "gptq-v2"
    zeros = generator.integers(int(first), 16, (groups, outputs))
    if "symmetric" in layout:
        zeros[:] = 8
    scale = torch.from_numpy(generator.uniform(0.002, 0.01, (groups, outputs))).to(scales)
    group = np.arange(inputs) // size
    if "act-order" in layout:
        generator.shuffle(group)
    exact = scale.double().numpy()[group] * (stored - zeros[group]).astype(np.float64)
    if "awq" in layout:
        parts = {"qweight": _packed(stored, AWQ_COLUMNS), "qzeros": _packed(zeros, AWQ_COLUMNS)}
    else:
        parts = {"qweight": _packed(stored.T).T.contiguous(), "qzeros": _packed(zeros - first)}
        if not layout.startswith("round"):
            parts["g_idx"] = torch.from_numpy(group.astype(np.int32))
    return {**parts, "scales": scale}, torch.from_numpy(exact)


def store_packed(
    source: Path, target: Path, layout: str, *, scales: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """Write a checkpoint with random packed projections; returns its matrices in float64.

    The shapes of matrices and all other weights are those of a checkpoint `source`.
    """
    return store_projections(
        source,
        target,
        lambda outputs, inputs, generator: pack(inputs, outputs, layout, generator, scales),
        settings_of(layout),
    )


def store_projections(
    source: Path,
    target: Path,
    pack: Callable[[int, int, np.random.Generator], tuple[dict[str, Tensor], Tensor]],
    settings: dict[str, Any],
    *,
    transposed: bool = True,
) -> dict[str, Tensor]:
    """Write a checkpoint with other projections; return their matrices.

    Args:
        source: The checkpoint with the shapes of matrices and all other weights.
        pack: Returns the parts and the matrix for a number of outputs and inputs.
        settings: The quantization_config.
        transposed: Whether the matrices that `pack` returns are [inputs, outputs].
    """
    shutil.copytree(source, target)
    generator = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        is_conv = ".c_" in name and name.endswith(".weight")
        if "_proj.weight" not in name and not is_conv:
            tensors[name] = value
            continue
        outputs, inputs = value.shape[::-1] if is_conv else value.shape
        parts, whole = pack(outputs, inputs, generator)
        prefix = name.removesuffix("weight")
        tensors |= {f"{prefix}{part}": tensor for part, tensor in parts.items()}
        exact[name] = whole if is_conv == transposed else whole.T.contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config))
    return exact


def edit(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(fields)
    file.write_text(json.dumps(config))


def store_exact(source: Path, target: Path, exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write the checkpoint `source` with matrices rounded once from float64."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: value.to(dtype) for name, value in exact.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def store_in_int4(source: Path, target: Path) -> dict[str, Tensor]:
    """Write a checkpoint with projections in 4 bits of compressed-tensors; returns its matrices."""
    helpers = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    shutil.copytree(source, target)
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name or value.shape[1] % GROUP:
            tensors[name] = value
            continue
        blocks = value.unflatten(1, (-1, GROUP))
        scale = blocks.abs().amax(2) / 7
        whole = (blocks / scale[..., None]).round().clamp(-8, 7)
        exact[name] = (whole * scale[..., None]).flatten(1)
        prefix = name.removesuffix("weight")
        tensors[f"{prefix}weight_packed"] = helpers.pack_to_int32(
            whole.flatten(1).to(torch.int8), 4
        )
        tensors[f"{prefix}weight_scale"] = scale
        tensors[f"{prefix}weight_shape"] = torch.tensor(value.shape)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = INT4
    (target / "config.json").write_text(json.dumps(config))
    return exact
