"""Fused experts that stay in the 4 bits that their checkpoint stores (MXFP4, as in gpt-oss).

A number is one of sixteen e2m1 values times a power of two that 32 numbers share. All products are
exact in bfloat16, so experts in 4 bits differ from expanded ones only in the order of sums. Four
numbers take 17 bits instead of 64.

Legend: E experts, S pairs of a row and an expert, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from treegen.model.linear.experts import (
    FusedExperts,
    GroupedExperts,
    convert_experts,
    fused_experts,
)

GROUP: Final = 32
"""Numbers that share a scale."""
BYTES_PER_NUMBER: Final = 17 / GROUP
_METHOD: Final = "treegen-mxfp4"
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Experts(GroupedExperts):
    """Experts whose tensors are in MXFP4. Each tensor NAME is stored as two parameters.

    NAME_blocks: uint8 [E, N, K / 32, 16], two numbers per byte, the first in the low half.

    NAME_scales: uint8 [E, N, K / 32], exponents of powers of two with a bias of 127.
    """

    def _product(
        self,
        name: str,
        rows: Tensor,
        routes: tuple[Tensor, Tensor],
        pairs_per_row: int,
        dtype: torch.dtype,
    ) -> Tensor:
        stock: Any = self
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        bias = getattr(self, f"{name}_bias") if stock.has_bias else None
        halves = rows.unflatten(1, (-1, 2)).transpose(1, 2).contiguous()
        out: Tensor = mxfp4_product(halves, blocks.flatten(2), scales, bias, *routes, pairs_per_row)
        return out


@torch.library.custom_op("treegen::mxfp4_product", mutates_args=())
def mxfp4_product(
    halves_M2H: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias_EN: Tensor | None,
    order_S: Tensor,
    blocks_3B: Tensor,
    pairs_per_row: int,
) -> Tensor:
    """Return the product of each pair's row and its expert's matrix, [S, N].

    Pairs in no block are left without values.

    Args:
        halves_M2H: Rows [S / pairs_per_row, 2, K / 2]: the numbers at even places, then the others.
        weight: Packed weights, uint8 [E, N, K / 2].
        scale: Exponents of scales, uint8 [E, N, K / 32].
        bias_EN: Biases [E, N]; None for none.
        order_S: The sorted pairs, from `treegen.model.linear.experts.group_by_expert`.
        blocks_3B: Their blocks, from `group_by_expert`.
        pairs_per_row: Consecutive pairs that share a row.
    """
    out = halves_M2H.new_empty(len(order_S), weight.shape[1])
    if halves_M2H.device.type == "cuda":
        from treegen.model.linear.mxfp4_kernels import mxfp4_product as on_gpu

        on_gpu(halves_M2H, weight, scale, bias_EN, order_S, blocks_3B, pairs_per_row, out)
        return out
    rows = halves_M2H.transpose(1, 2).flatten(1).float()
    for expert, begin, end in blocks_3B.T.tolist():
        if expert < 0:
            break
        pairs = order_S[begin:end]
        made = rows[pairs // pairs_per_row] @ dequantize_mxfp4(weight[expert], scale[expert]).T
        out[pairs] = (made if bias_EN is None else made + bias_EN[expert].float()).to(out.dtype)
    return out


@mxfp4_product.register_fake
def _(
    halves_M2H: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias_EN: Tensor | None,
    order_S: Tensor,
    blocks_3B: Tensor,
    pairs_per_row: int,
) -> Tensor:
    return halves_M2H.new_empty(order_S.shape[0], weight.shape[1])


def dequantize_mxfp4(bytes_NH: Tensor, scales_NG: Tensor) -> Tensor:
    """Return MXFP4 numbers as float32 [N, K], from bytes [N, K / 2] and scales [N, K / 32]."""
    numbers = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=bytes_NH.device)
    halves = torch.stack([bytes_NH & 15, bytes_NH >> 4], dim=-1).flatten(-2)
    powers_NG = (scales_NG.float() - 127).exp2()
    return numbers[halves.int()] * powers_NG.repeat_interleave(GROUP, dim=-1)


def can_keep(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device computes with the 4 bits of a checkpoint that stores MXFP4.

    Args:
        config: The model's configuration.
        device: The device, which must be a GPU.
        dtype: The type to compute in, which must be bfloat16.
    """
    return device.type == "cuda" and dtype == torch.bfloat16 and config.model_type == "gpt_oss"


def fits_expanded(config: PretrainedConfig, device: torch.device) -> bool:
    """Return whether expanded experts, faster for many rows, fit in half of a GPU's memory."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return num_in_experts(config) * torch.bfloat16.itemsize <= total / 2


def keep_on_load(config: PretrainedConfig) -> None:
    """Make transformers load MXFP4 as it is stored. The configuration is changed."""
    config.quantization_config = {"quant_method": _METHOD}


def num_in_experts(config: PretrainedConfig) -> int:
    """Return how many numbers the expert matrices of a gpt-oss model have."""
    matrices = 3 * config.num_local_experts * config.num_hidden_layers
    return int(matrices * config.hidden_size * config.intermediate_size)


def replace_with_empty(module: nn.Module) -> None:
    """Turn the (transposed) experts of a module into `Mxfp4Experts` with uninitialised weights."""
    for _, experts in [*fused_experts(module)]:
        _empty(experts)


def _empty(fused: FusedExperts) -> None:
    part = fused.module
    for name in fused.tensors:
        experts, inputs, outputs = part._parameters.pop(name).shape
        shape = experts, outputs, inputs // GROUP
        for end, size in (("blocks", (*shape, GROUP // 2)), ("scales", shape)):
            empty = torch.empty(size, dtype=torch.uint8)
            part.register_parameter(f"{name}_{end}", nn.Parameter(empty, requires_grad=False))
    convert_experts(fused, Mxfp4Experts)


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, **settings: Any) -> None:
        super().__init__(quant_method=_METHOD)


@register_quantizer(_METHOD)
class _Mxfp4Quantizer(HfQuantizer):  # type: ignore[misc]
    """Makes transformers create and fill modules whose experts are in 4 bits."""

    requires_calibration = False
    is_trainable = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_settings: Any
    ) -> None:
        replace_with_empty(model)
        # transformers initialises the tensors of the stock class, so it needs placeholders.
        for part in _experts(model):
            part.gate_up_proj = part.down_proj = torch.empty(0)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_settings: Any) -> None:
        for part in _experts(model):
            del part.gate_up_proj, part.down_proj

    def is_serializable(self, *_arguments: Any, **_options: Any) -> bool:
        return False


def _experts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, Mxfp4Experts)]
