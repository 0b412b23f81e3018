"""Random matrices in 4 bits, their exact numbers, and what may differ from these."""

import torch
from torch import Tensor

from treegen.model.checkpoint.fp4 import dequantize_fp4

FORMATS = ["mxfp4", "nvfp4"]
Matrices = tuple[Tensor, Tensor, Tensor | None]  # bytes, scales, factors


def stored(kind: str, *shape: int) -> Matrices:
    """Random matrices [..., N, K] in 4 bits."""
    outer, inputs = shape[:-1], shape[-1]
    weight = torch.randint(0, 256, (*outer, inputs // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        return weight, torch.randint(120, 130, (*outer, inputs // 32), dtype=torch.uint8), None
    scale = torch.randint(0, 127, (*outer, inputs // 16), dtype=torch.uint8)
    return weight, scale.view(torch.float8_e4m3fn), torch.rand(outer) * 1e-3


def exact(matrices: Matrices) -> Tensor:
    weight, scale, factor = matrices
    whole = dequantize_fp4(weight, scale).double()
    return whole if factor is None else whole * factor.double()[..., None]


def limit(want: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to 8 bits leaves, beside that of sums in float32."""
    return 2e-6 * size + (2**-8 * want.abs() if dtype == torch.bfloat16 else 0.0)


def check_products(
    got: Tensor, rows: Tensor, matrices: Matrices, bias: Tensor | None, chosen_TX: Tensor
) -> None:
    """Check products of rows with the experts that they chose; a number too large is none."""
    num, each = len(matrices[0]), chosen_TX.shape[1]
    live_S = chosen_TX.reshape(-1) < num
    at_S = chosen_TX.reshape(-1).clamp(max=num - 1)
    a, b = rows.double().repeat_interleave(each, 0), exact(matrices)[at_S]
    want = torch.einsum("sk,snk->sn", a, b)
    size = torch.einsum("sk,snk->sn", a.abs(), b.abs()) + 1e-6
    if bias is not None:
        want = want + bias.double()[at_S]
        size = size + want.abs()
    far = (got.cpu().double() - want).abs()
    assert (far <= limit(want, size, got.dtype))[live_S].all()
