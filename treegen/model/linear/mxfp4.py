"""Fused experts that stay in the 4 bits that their checkpoint stores (MXFP4, as in gpt-oss).

A number is one of sixteen e2m1 values times a power of two that 32 numbers share. All products are
exact in bfloat16, so experts in 4 bits differ from expanded ones only in the order of sums. Four
numbers take 17 bits instead of 64.

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from treegen.model.linear.experts import FusedExperts, Routes, convert_experts, fused_experts
from treegen.model.linear.fp4 import FourBitExperts, grouped_fp4_product, split_rows

GROUP: Final = 32
"""Numbers that share a scale."""
BYTES_PER_NUMBER: Final = 17 / GROUP
_METHOD: Final = "treegen-mxfp4"


class Mxfp4Experts(FourBitExperts):
    """Experts whose tensors are in MXFP4. Each tensor NAME is stored as two parameters.

    NAME_blocks: uint8 [E, N, K / 32, 16], two numbers per byte, the first in the low half.

    NAME_scales: uint8 [E, N, K / 32], exponents of powers of two with a bias of 127.
    """

    def _product(self, name: str, rows: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
        stock: Any = self
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        bias = getattr(self, f"{name}_bias") if stock.has_bias else None
        out: Tensor = grouped_fp4_product(
            split_rows(rows), blocks.flatten(2), scales, None, bias, *routes, self.expands
        )
        return out


def keep_on_load(config: PretrainedConfig) -> None:
    """Make transformers load MXFP4 as it is stored. The configuration is changed."""
    config.quantization_config = {"quant_method": _METHOD}


def num_in_experts(config: PretrainedConfig) -> int:
    """Return how many numbers the expert matrices of a gpt-oss model have."""
    matrices = 3 * config.num_local_experts * config.num_hidden_layers
    return int(matrices * config.hidden_size * config.intermediate_size)


def replace_with_empty(module: nn.Module) -> None:
    """Turn the (transposed) experts of a module into `Mxfp4Experts` with uninitialized weights."""
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
        # transformers initializes the tensors of the stock class, so it needs placeholders.
        for part in _experts(model):
            part.gate_up_proj = part.down_proj = torch.empty(0)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_settings: Any) -> None:
        for part in _experts(model):
            del part.gate_up_proj, part.down_proj

    def is_serializable(self, *_arguments: Any, **_options: Any) -> bool:
        return False


def _experts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, Mxfp4Experts)]
