"""Tiny checkpoints in bitsandbytes' 4 and 8 bits, written and expanded in numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed_checkpoints import store_projections
from torch import Tensor

_FOUR: dict[str, Any] = {"load_in_4bit": True, "load_in_8bit": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {**_FOUR, "bnb_4bit_quant_type": "nf4"},
    "fp4-double": {**_FOUR, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4-double-bfloat16": {**_FOUR, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_4bit": False, "load_in_8bit": True},
}
"""What each layout writes into quantization_config."""
BLOCKS = {"nf4": 64, "fp4-double": 128, "nf4-double-bfloat16": 4096}


def pack(
    shape: tuple[int, int], layout: str, generator: np.random.Generator, block: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random matrix by the ends of their names, and the matrix in float32.

    Args:
        block: Numbers that share a scale, where it is not the layout's.
    """
    if layout == "int8":
        stored = generator.integers(-127, 128, shape, dtype=np.int8)
        largest = generator.uniform(0.2, 1, shape[0]).astype(np.float32)
        product = stored.astype(np.float32) * largest[:, None]
        exact = product * np.float32(7.874015718698502e-3)
        parts = {"weight": stored, "SCB": largest, "weight_format": np.array(0, np.uint8)}
        return {name: torch.from_numpy(each) for name, each in parts.items()}, _tensor(exact)
    kind, size = layout[:3], block or BLOCKS[layout]
    count = shape[0] * shape[1]
    named = generator.integers(0, 16, count)
    numbers = generator.uniform(-1, 1, 16).astype(np.float32)
    scales = generator.uniform(0.05, 0.2, -(-count // size)).astype(np.float32)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "float16",
        "shape": [*shape],
    }
    parts = {"quant_map": numbers, "absmax": scales}
    if "double" in layout:
        of_scales = generator.integers(0, 256, len(scales), dtype=np.uint8)
        nested = generator.uniform(-1, 1, 256).astype(np.float32)
        above = generator.uniform(0.01, 0.1, -(-len(scales) // 256)).astype(np.float32)
        offset = np.float32(generator.uniform(0.1, 0.2))
        scales = nested[of_scales] * above[np.arange(len(scales)) // 256] + offset
        parts |= {"absmax": of_scales, "nested_quant_map": nested, "nested_absmax": above}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state |= {"nested_offset": float(offset)}
    exact = (numbers[named] * scales[np.arange(count) // size]).reshape(shape)
    halves = np.append(named, [0] * (count % 2)).reshape(-1, 2)
    pairs = torch.from_numpy((16 * halves[:, 0] + halves[:, 1]).astype(np.uint8))[:, None]
    if layout.endswith("bfloat16"):
        pairs = pairs.reshape(-1, 2).view(torch.bfloat16)
    packed = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
    parts[f"quant_state.bitsandbytes__{kind}"] = packed
    tensors = {f"weight.{name}": torch.from_numpy(each) for name, each in parts.items()}
    return {"weight": pairs, **tensors}, _tensor(exact)


def _tensor(exact: np.ndarray) -> Tensor:
    assert exact.dtype == np.float32
    return torch.from_numpy(exact)


def store_bnb(source: Path, target: Path, layout: str) -> dict[str, Tensor]:
    """Write a checkpoint with random projections in few bits; returns these in float32.

    The shapes of matrices and all other weights are those of a checkpoint `source`. Conv1D
    matrices are stored as those of linear layers, as transformers does.
    """
    return store_projections(
        source,
        target,
        lambda outputs, inputs, generator: pack((outputs, inputs), layout, generator),
        {"quant_method": "bitsandbytes", **SETTINGS[layout]},
        transposed=False,
    )
