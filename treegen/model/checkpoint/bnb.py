"""Expand bitsandbytes' matrices in 4 and 8 bits, exactly as the library does.

- 4 bits: numbers are stored row by row, two per byte, the first in the high half. Each is an index
  into the 16 numbers of quant_map (nf4 or fp4), multiplied by the scale of its block (absmax). With
  double quantisation the scales are indices into a map of 256 numbers, with scales of blocks
  (nested_absmax) and an offset. A JSON text, stored as bytes, has the block sizes and the shape.
- 8 bits (LLM.int8): integers times the largest number of their row (SCB), divided by 127.

Sources: bitsandbytes' functional.py (QuantState) and backends/default/ops.py. Packed data is read
as bytes, whatever type it is stored as.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_STATE: Final = "weight.quant_state.bitsandbytes__"
PARTS_4: Final = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    f"{_STATE}nf4",
    f"{_STATE}fp4",
)
"""Name suffixes of the tensors that store a matrix in 4 bits."""
PARTS_8: Final = ("weight", "SCB", "weight_format")
"""Name suffixes of the tensors that store a matrix in 8 bits."""
_ROWS: Final = 0
"""The only `weight_format` without a byte order for old GPUs."""
_OVER_127: Final = 7.874015718698502e-3


def dequantize_4bit(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [N, K] that is stored in 4 bits, in float32.

    Raises:
        ValueError: the tensors do not fit together.
    """
    state = _state(next((v for k, v in parts.items() if k.startswith(_STATE)), None))
    shape = [int(size) for size in state["shape"]]
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"a matrix of shape {shape}")
    count = math.prod(shape)
    pairs = parts["weight"].contiguous().view(torch.uint8).reshape(-1)
    if len(pairs) != -(-count // 2):
        raise ValueError(f"{len(pairs)} bytes do not make {shape}")
    scales = parts["weight.absmax"]
    if "nested_offset" in state:
        scales = _dequantize_blocks(
            scales,
            parts["weight.nested_quant_map"],
            parts["weight.nested_absmax"],
            state["nested_blocksize"],
            256,
        ) + torch.tensor(float(state["nested_offset"]), device=scales.device)
    halves = torch.stack([pairs >> 4, pairs & 15], dim=1).reshape(-1)[:count]
    return _dequantize_blocks(
        halves, parts["weight.quant_map"], scales, state["blocksize"], 16
    ).reshape(shape)


def dequantize_8bit(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [N, K] that is stored in 8 bits, in float32.

    Raises:
        ValueError: the tensors do not fit together.
    """
    stored_NK, largest_N = parts["weight"], parts["SCB"].reshape(-1).float()
    if stored_NK.dtype != torch.int8 or stored_NK.shape[:-1] != largest_N.shape:
        raise ValueError(f"SCB {[*largest_N.shape]} does not fit {[*stored_NK.shape]}")
    order = parts.get("weight_format")
    if order is not None and int(order) != _ROWS:
        raise ValueError(f"weight_format {int(order)} is an order for old GPUs")
    return stored_NK * largest_N[:, None] * _OVER_127


def _dequantize_blocks(
    named: Tensor, numbers: Tensor, scales: Tensor, size: Any, count: int
) -> Tensor:
    """Look up indices in `numbers` [count] and multiply by the scale of each block of `size`."""
    blocks = -(-len(named) // max(int(size), 1))
    if int(size) < 1 or numbers.shape != (count,) or scales.shape != (blocks,):
        raise ValueError(f"{len(scales)} scales, not {blocks}, or {len(numbers)} numbers")
    scale = scales.float().repeat_interleave(int(size))[: len(named)]
    return numbers.float()[named.long()] * scale


def _state(stored: Tensor | None) -> dict[str, Any]:
    if stored is None:
        raise ValueError("quant_state is missing")
    state = json.loads(bytes(stored.tolist()))
    if not isinstance(state, dict) or not {"shape", "blocksize"} <= state.keys():
        raise ValueError("quant_state lacks shape or blocksize")
    return state
