"""Matrices that stay in the 4 bits that their checkpoint stores, and rows in 16 bits.

A number is one of sixteen e2m1 values, times a scale that a group of inputs shares: a power of two
for 32 inputs (MXFP4), or a number in e4m3 for 16 inputs, times one number for a whole matrix
(NVFP4). An e2m1 value times an e4m3 scale has 6 significant bits and is exact in bfloat16, so
matrices in 4 bits differ from expanded ones in the order of sums, and in that the factor of a
matrix multiplies sums instead of rounding weights. For many rows, a GPU expands matrices into
scratch memory first (`fp4_expansion`).

Legend: M rows, E experts, S pairs of a row and an expert, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.linear.experts import GroupedExperts, Routes


class Fp4Linear(nn.Linear):
    """A linear layer whose weight is in NVFP4: uint8 [out_features, in_features / 2].

    A byte has two numbers, the first in the low half.
    """

    scale: nn.Parameter
    """[out_features, in_features / 16], float8_e4m3fn."""
    factor: nn.Parameter
    """[out_features], float32, a factor for each output."""
    expands: bool = True
    """Whether many rows may be multiplied by the expanded matrix, in another order of sums."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias, [..., out_features], in the type of the input."""
        return fp4_linear(
            input, self.weight, self.scale, self.factor, self.bias, expands=self.expands
        )


class FourBitExperts(GroupedExperts):
    """Experts whose tensors are in 4 bits."""

    expands: bool = True
    """Whether many rows may be multiplied by expanded matrices, in another order of sums."""

    def _get_matrices(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the weights, scales and factors that `grouped_fp4_product` needs of a tensor."""
        raise NotImplementedError

    def _product(self, name: str, rows: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
        stock: Any = self
        bias = getattr(self, f"{name}_bias") if stock.has_bias else None
        matrices = *self._get_matrices(name), bias
        out: Tensor = grouped_fp4_product(split_rows(rows), *matrices, *routes, self.expands)
        return out


class Fp4Experts(FourBitExperts):
    """Experts whose tensors are in NVFP4. Each tensor NAME is stored as three parameters.

    NAME: uint8 [E, N, K / 2].

    NAME_scale: float8_e4m3fn [E, N, K / 16].

    NAME_factor: float32 [E, N].
    """

    def _get_matrices(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        return getattr(self, name), getattr(self, f"{name}_scale"), getattr(self, f"{name}_factor")


def split_rows(rows: Tensor) -> Tensor:
    """Return rows [M, K] as [M, 4, K / 4]: every fourth number, from each of the first four on."""
    quarters: Tensor = rows.unflatten(1, (-1, 4)).transpose(1, 2).contiguous()
    return quarters


def fp4_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    factor_N: Tensor,
    bias: Tensor | None,
    *,
    expands: bool = True,
) -> Tensor:
    """Return input [..., K] times the transpose of a matrix in NVFP4, [..., N].

    Args:
        input: Inputs [..., K]; the result has their type.
        weight: Packed weights, uint8 [N, K / 2].
        scale: Scales, float8_e4m3fn [N, K / 16].
        factor_N: The factor of each output, float32 [N].
        bias: Bias [N]; None for none.
        expands: Whether many rows may be multiplied by the expanded matrix, in another order of
            sums.
    """
    quarters = split_rows(input.reshape(-1, input.shape[-1]))
    out: Tensor = fp4_product(quarters, weight, scale, factor_N, bias, expands)
    return out.reshape(*input.shape[:-1], len(weight))


@torch.library.custom_op("treegen::fp4_product", mutates_args=())
def fp4_product(
    quarters_M4Q: Tensor,
    weight: Tensor,
    scale: Tensor,
    factor_N: Tensor,
    bias: Tensor | None,
    expands: bool,
) -> Tensor:
    """Return the product of rows and the transpose of a matrix in NVFP4, [M, N].

    Args:
        quarters_M4Q: Rows [M, 4, K / 4], from `split_rows`.
        weight: Packed weights, uint8 [N, K / 2].
        scale: Scales, float8_e4m3fn [N, K / 16].
        factor_N: The factor of each output, float32 [N].
        bias: Bias [N]; None for none.
        expands: As in `fp4_linear`.
    """
    out = quarters_M4Q.new_empty(len(quarters_M4Q), len(weight))
    if quarters_M4Q.device.type == "cuda":
        from treegen.model.linear import fp4_expansion, fp4_kernels

        is_wide = expands and fp4_expansion.is_faster(len(out), 0, out.device)
        multiply = (fp4_expansion if is_wide else fp4_kernels).fp4_linear
        multiply(quarters_M4Q, (weight, scale.view(torch.uint8), factor_N, bias), out)
        return out
    rows = quarters_M4Q.transpose(1, 2).flatten(1).float()
    product = linear(rows, dequantize_fp4(weight, scale)) * factor_N
    return out.copy_(product if bias is None else product + bias.float())


@fp4_product.register_fake
def _(quarters_M4Q: Tensor, weight: Tensor, *_args: Any) -> Tensor:
    return quarters_M4Q.new_empty(quarters_M4Q.shape[0], weight.shape[0])


@torch.library.custom_op("treegen::grouped_fp4_product", mutates_args=())
def grouped_fp4_product(
    quarters_M4Q: Tensor,
    weight: Tensor,
    scale: Tensor,
    factor_EN: Tensor | None,
    bias_EN: Tensor | None,
    order_S: Tensor,
    blocks_3B: Tensor,
    pairs_per_row: int,
    expands: bool,
) -> Tensor:
    """Return the product of each pair's row and its expert's matrix, [S, N].

    Pairs in no block are left without values.

    Args:
        quarters_M4Q: Rows [S / pairs_per_row, 4, K / 4], from `split_rows`.
        weight: Packed weights, uint8 [E, N, K / 2].
        scale: Scales: uint8 [E, N, K / 32], exponents of powers of two with a bias of 127; or
            float8_e4m3fn [E, N, K / 16].
        factor_EN: The factor of each output, float32 [E, N]; None if scales are powers of two.
        bias_EN: Biases [E, N]; None for none.
        order_S: The sorted pairs, from `treegen.model.linear.experts.group_by_expert`.
        blocks_3B: Their blocks, from `group_by_expert`.
        pairs_per_row: Consecutive pairs that share a row.
        expands: As in `fp4_linear`.
    """
    out = quarters_M4Q.new_empty(len(order_S), weight.shape[1])
    if quarters_M4Q.device.type == "cuda":
        from treegen.model.linear import fp4_expansion, fp4_kernels

        is_wide = expands and fp4_expansion.is_faster(len(out), len(weight), out.device)
        multiply = (fp4_expansion if is_wide else fp4_kernels).grouped_fp4_product
        matrices = weight, scale.view(torch.uint8), factor_EN, bias_EN
        multiply(quarters_M4Q, matrices, (order_S, blocks_3B, pairs_per_row), out)
        return out
    rows = quarters_M4Q.transpose(1, 2).flatten(1).float()
    for expert, begin, end in blocks_3B.T.tolist():
        if expert < 0:
            break
        pairs = order_S[begin:end]
        product = rows[pairs // pairs_per_row] @ dequantize_fp4(weight[expert], scale[expert]).T
        product = product if factor_EN is None else product * factor_EN[expert]
        out[pairs] = (product if bias_EN is None else product + bias_EN[expert].float()).to(
            out.dtype
        )
    return out


@grouped_fp4_product.register_fake
def _(*arguments: Any) -> Tensor:
    quarters_M4Q, weight, _, _, _, order_S, *_ = arguments
    empty: Tensor = quarters_M4Q.new_empty(order_S.shape[0], weight.shape[1])
    return empty
