"""Keep matrices in 4 bits while transformers loads a checkpoint, and put them into the module.

Experts in MXFP4 (as in gpt-oss): a number is one of sixteen e2m1 values times a power of two that
32 numbers share. All products are exact in bfloat16, so experts in 4 bits differ from expanded ones
only in the order of sums. Four numbers take 17 bits instead of 64.

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from treegen.errors import InputError, arg
from treegen.model.checkpoint.fp4 import GROUP, Fp4Matrix, StoredMatrices, dequantize_fp4
from treegen.model.checkpoint.quantization import QuantizationInfo
from treegen.model.linear.experts import FusedExperts, convert_experts, fused_experts
from treegen.model.linear.fp4 import FourBitExperts, Fp4Experts, Fp4Linear
from treegen.model.linear.fp8 import MULTIPLE, iter_fp8_linears
from treegen.ops.attention.types import FP8

_MXFP4_GROUP: Final = 32
"""Numbers that share a scale."""
MXFP4_BYTES_PER_NUMBER: Final = 17 / _MXFP4_GROUP
_MXFP4_METHOD: Final = "treegen-mxfp4"


class Mxfp4Experts(FourBitExperts):
    """Experts whose tensors are in MXFP4. Each tensor NAME is stored as two parameters.

    NAME_blocks: uint8 [E, N, K / 32, 16], two numbers per byte, the first in the low half.

    NAME_scales: uint8 [E, N, K / 32], exponents of powers of two with a bias of 127.
    """

    def _get_matrices(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        return getattr(self, f"{name}_blocks").flatten(2), getattr(self, f"{name}_scales"), None


def keep_on_load(config: PretrainedConfig) -> None:
    """Make transformers load MXFP4 as it is stored. The configuration is changed."""
    config.quantization_config = {"quant_method": _MXFP4_METHOD}


def num_in_experts(config: PretrainedConfig) -> int:
    """Return how many numbers the expert matrices of a gpt-oss model have."""
    matrices = 3 * config.num_local_experts * config.num_hidden_layers
    return int(matrices * config.hidden_size * config.intermediate_size)


def replace_with_empty_mxfp4(module: nn.Module) -> None:
    """Turn the (transposed) experts of a module into `Mxfp4Experts` with uninitialized weights."""
    for _, experts in [*fused_experts(module)]:
        _empty_experts(experts)


def _empty_experts(fused: FusedExperts) -> None:
    part = fused.module
    for name in fused.tensors:
        experts, inputs, outputs = part._parameters.pop(name).shape
        shape = experts, outputs, inputs // _MXFP4_GROUP
        for end, size in (("blocks", (*shape, _MXFP4_GROUP // 2)), ("scales", shape)):
            empty = torch.empty(size, dtype=torch.uint8)
            part.register_parameter(f"{name}_{end}", nn.Parameter(empty, requires_grad=False))
    convert_experts(fused, Mxfp4Experts)


@register_quantization_config(_MXFP4_METHOD)
class _Mxfp4Config(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, **settings: Any) -> None:
        super().__init__(quant_method=_MXFP4_METHOD)


@register_quantizer(_MXFP4_METHOD)
class _Mxfp4Quantizer(HfQuantizer):  # type: ignore[misc]
    """Makes transformers create and fill modules whose experts are in 4 bits."""

    is_trainable = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_settings: Any
    ) -> None:
        replace_with_empty_mxfp4(model)
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


class KeptMatrices:
    """The matrices in NVFP4 that stay in 4 bits: of linear layers and of fused experts.

    The same layers are eligible as for FP8. Experts with transposed tensors are expanded.
    """

    def __init__(self) -> None:
        self.count = 0
        """Matrices that stay in 4 bits."""
        self.numbers = 0
        """Numbers in them."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._matrices: dict[str, tuple[Fp4Matrix, int]] = {}

    def __deepcopy__(self, memo: Any) -> KeptMatrices:
        return self

    def start(self, model: PreTrainedModel) -> None:
        """Find the layers of a model, which has no data yet."""
        self._shapes = {
            f"{name}.weight": tuple(part.weight.shape) for name, part in iter_fp8_linears(model)
        }
        for name, experts in fused_experts(model):
            for tensor in experts.tensors if _fits(experts) else ():
                shape = getattr(experts.module, tensor).shape
                self._shapes[f"{name}.{tensor}"] = tuple(shape)

    def keep(self, name: str, matrices: Sequence[Sequence[Fp4Matrix]]) -> bool:
        """Keep the matrices of a layer; return whether it can be kept.

        Args:
            name: The name of the weight in the model.
            matrices: The matrices of each expert, for each tensor that is merged into the weight;
                one list with one matrix for a linear layer.
        """
        if name not in self._shapes:
            return False
        if any(len({matrix.weight.shape for matrix in side}) > 1 for side in matrices):
            return False
        num = sum(map(len, matrices))
        if name.endswith(".weight"):
            if num != 1:
                return False
            matrix = matrices[0][0]
        else:
            sides = [
                [torch.stack(tensors) for tensors in zip(*side, strict=True)] for side in matrices
            ]
            joined = (torch.cat(tensors, dim=1) for tensors in zip(*sides, strict=True))
            matrix = Fp4Matrix(*joined)
        *outer, pairs = matrix.weight.shape
        if (*outer, 2 * pairs) != self._shapes[name]:
            return False  # the layer has a part of the stored matrix, or several matrices
        self._matrices[name] = (matrix, num)
        return True

    def install(self, module: nn.Module, device: torch.device) -> None:
        """Replace the layers of a loaded module by layers in 4 bits, on a device.

        Args:
            module: The module, whose layers have zeros as weights. It is changed.
            device: The device of the matrices.
        """
        for name, part in [*iter_fp8_linears(module)]:
            if (weight_name := f"{name}.weight") in self._matrices:
                matrix, num = self._matrices.pop(weight_name)
                _replace_linear(part, matrix, device)
                self._add(num, matrix)
        for name, experts in [*fused_experts(module)]:
            names = [f"{name}.{tensor}" for tensor in experts.tensors]
            matrices = [self._matrices.pop(tensor_name, None) for tensor_name in names]
            if all(matrices):
                sides = cast(list[tuple[Fp4Matrix, int]], matrices)
                _replace_experts(experts, [matrix for matrix, _ in sides], device)
                for matrix, num in sides:
                    self._add(num, matrix)
                continue
            for tensor_name, kept in zip(experts.tensors, matrices, strict=True):
                if kept is not None:  # only one of the two tensors is in NVFP4
                    weight = getattr(experts.module, tensor_name)
                    weight.data = _expand(kept[0]).to(weight.dtype)
        self._matrices.clear()  # the rest belongs to parts that text never reaches

    def _add(self, num: int, matrix: Fp4Matrix) -> None:
        self.count += num
        self.numbers += 2 * matrix.weight.numel()

    def describe_expanded(self, stored: StoredMatrices | None, num_fp8: int) -> str:
        """Return a line about the matrices that were expanded after all; empty for none.

        Args:
            stored: The matrices of the checkpoint.
            num_fp8: Matrices that stay in FP8.
        """
        num_stored = len(stored.fp4) + len(stored.fp8) if stored is not None else self.count
        if not (expanded := num_stored - self.count - num_fp8):
            return ""
        also = f" and {num_fp8:,} in FP8" if num_fp8 else ""
        return f"{self.count:,} matrices stay in NVFP4{also}; {expanded:,} others were expanded"


def kept_in_4_bits(
    config: PretrainedConfig,
    num_in_linears: int,
    stored: QuantizationInfo | None,
    quantization: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Return the format, "mxfp4" or "nvfp4", in which stored weights stay; empty if in none.

    Weights in 4 bits are faster for few rows, expanded ones for many. So by default they stay in 4
    bits if the expanded ones would take more than half of the device's memory.

    Args:
        config: The model's configuration.
        num_in_linears: Numbers in its linear layers and experts.
        stored: How the weights are quantized; None if they are not.
        quantization: As in `load_model`.
        device: The device, which must be a GPU of compute capability 8.0 or more.
        dtype: The type to compute in, which must be bfloat16.

    Raises:
        InputError: quantization is a format in 4 bits that the checkpoint does not store.
    """
    form, numbers = "", num_in_linears
    if stored is not None and stored.method == "mxfp4":
        form, numbers = "mxfp4", num_in_experts(config) if config.model_type == "gpt_oss" else 0
    elif stored is not None and stored.is_fp4:
        form = "nvfp4"
    if quantization in ("mxfp4", "nvfp4") and quantization != form:
        raise InputError(
            f"{arg('quantization', quantization)} requires a checkpoint with "
            f"{quantization.upper()} weights; remove this argument"
        )
    if not form or not numbers or not can_keep_fp4(device, dtype):
        return ""
    is_kept = quantization == form or (quantization is None and not fits_expanded(numbers, device))
    return form if is_kept else ""


def can_keep_fp4(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device computes with matrices in 4 bits; assumed if none is available."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def fits_expanded(numbers: int, device: torch.device) -> bool:
    """Return whether numbers in bfloat16 fit in half of a GPU's memory."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return numbers * torch.bfloat16.itemsize <= total / 2


def replace_with_empty_fp4(module: nn.Module) -> None:
    """Turn the layers of a module that may run in NVFP4 into NVFP4 layers without data."""
    device = torch.device("meta")
    for _, part in [*iter_fp8_linears(module)]:
        _replace_linear(part, _empty(part.weight), device)
    for _, experts in [*fused_experts(module)]:
        if _fits(experts):
            tensors = [getattr(experts.module, name) for name in experts.tensors]
            _replace_experts(experts, [_empty(tensor) for tensor in tensors], device)


def _empty(weight: Tensor) -> Fp4Matrix:
    shape, inputs = weight.shape[:-1], weight.shape[-1]
    return Fp4Matrix(
        weight.new_empty((*shape, inputs // 2), dtype=torch.uint8),
        weight.new_empty((*shape, inputs // GROUP), dtype=FP8),
        weight.new_empty(shape, dtype=torch.float32),
    )


def fill_random_fp4(part: nn.Module) -> None:
    """Fill a layer in NVFP4 with random numbers of about 0.02."""
    for weight in part.parameters(recurse=False):
        if weight.dtype == torch.uint8:
            weight.data.random_(0, 256)
        elif weight.dtype == FP8:
            weight.data.view(torch.uint8).random_(24, 88)  # 2^-4 to 2^4
        elif weight.dtype == torch.float32:
            weight.data.fill_(1e-3)
        else:
            weight.data.fill_(0.0)


def _fits(experts: FusedExperts) -> bool:
    part = experts.module
    sizes = [size for name in experts.tensors for size in part._parameters[name].shape[1:]]
    return not part.is_transposed and not any(size % MULTIPLE for size in sizes)


def _replace_linear(part: nn.Linear, matrix: Fp4Matrix, device: torch.device) -> None:
    part.weight = _parameter(matrix.weight, device)
    part.__class__ = Fp4Linear
    layer = cast(Fp4Linear, part)
    layer.scale = _parameter(matrix.scale, device)
    layer.factor = _parameter(matrix.factor.contiguous(), device)


def _replace_experts(
    experts: FusedExperts, sides: Sequence[Fp4Matrix], device: torch.device
) -> None:
    part = experts.module
    for name, matrix in zip(experts.tensors, sides, strict=True):
        setattr(part, name, _parameter(matrix.weight, device))
        part.register_parameter(f"{name}_scale", _parameter(matrix.scale, device))
        part.register_parameter(f"{name}_factor", _parameter(matrix.factor, device))
    convert_experts(experts, Fp4Experts)


def _parameter(tensor: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(tensor.to(device), requires_grad=False)


def _expand(matrix: Fp4Matrix) -> Tensor:
    return dequantize_fp4(matrix.weight, matrix.scale.float() * matrix.factor[..., None])
