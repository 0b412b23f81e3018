"""Tiny checkpoints in NVFP4, alone and with FP8, in the layouts of both tools.

Matrices are written and expanded number by number from the formats.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LAYOUTS = ("modelopt", "compressed-tensors")
FP8 = re.compile(r"o_proj|down_proj")
"""The layers in FP8 of mixed checkpoints."""
_NUMBERS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
_BYTES = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def settings_of(layout: str, names: list[str], *, mixed: bool) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose layers `names` are quantized."""
    if layout == "compressed-tensors":
        groups = {"group_1": {"targets": ["Linear"], "weights": _NUMBERS}}
        if mixed:
            groups = {"group_0": {"targets": ["re:.*(o|down)_proj$"], "weights": _BYTES}} | groups
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision" if mixed else "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": groups,
        }
    if not mixed:
        excluded = {"exclude_modules": ["lm_head", "*mlp.gate"]}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, **excluded}
    layers = {name: {"quant_algo": "FP8" if FP8.search(name) else "NVFP4"} for name in names}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }


def rounded(matrix: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a matrix in NVFP4, and its numbers in float32."""
    most = matrix.abs().max() / (6 * 448)
    scale = (matrix.unflatten(1, (-1, 16)).abs().amax(2) / 6 / most).clamp(min=2**-9)
    scale = scale.to(torch.float8_e4m3fn)
    if layout == "modelopt":
        whole, number = most, scale.float() * most
    else:
        whole = (1 / most).reshape(1)
        number = scale.float() / whole
    blocks = matrix.unflatten(1, (-1, 16)) / number[..., None]
    at = (blocks.abs()[..., None] - E2M1).abs().argmin(-1)
    exact = (E2M1[at] * blocks.sign() * number[..., None]).flatten(1)
    bits = (at + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    packed = bits[:, 0::2] | bits[:, 1::2] << 4
    if layout == "modelopt":
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, exact
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}, exact


def store_in_fp4(
    source: Path, target: Path, layout: str, *, mixed: bool = False, in_file: bool = False
) -> dict[str, Tensor]:
    """Write a checkpoint in NVFP4; returns its matrices in float32.

    The shapes of matrices and all other weights are those of a checkpoint `source`. `in_file` puts
    the settings into hf_quant_config.json alone.
    """
    shutil.copytree(source, target)
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = value
            continue
        prefix = name.removesuffix("weight")
        if mixed and FP8.search(name):
            shape = (len(value), 1) if layout == "compressed-tensors" else ()
            scale = value.abs().amax(1, keepdim=True) if shape else value.abs().max()
            scale = scale / 448
            parts = {"weight": (value / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
            exact[name] = parts["weight"].float() * scale
        else:
            parts, exact[name] = rounded(value, layout)
        parts["input_scale" if layout == "modelopt" else "input_global_scale"] = torch.ones(())
        tensors |= {f"{prefix}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    names = [name.removesuffix(".weight") for name in exact]
    settings = settings_of(layout, names, mixed=mixed)
    if in_file:
        document = {"producer": {"name": "modelopt"}, "quantization": settings}
        (target / "hf_quant_config.json").write_text(json.dumps(document))
        return exact
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config))
    return exact
