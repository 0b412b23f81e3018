"""Expand packed matrices (GPTQ, AWQ, AutoRound, bitsandbytes, NVFP4) one by one as they load.

In GPTQ, AWQ and AutoRound, a number is scale * (stored - zero), with a scale and a zero for each
output and group of inputs. int32 words hold eight 4-bit integers each:

- GPTQ packs stored integers along inputs and zeros along outputs, lowest bits first. Its first
  format stores zeros minus one, its second stores them unchanged. g_idx has each input's group;
  without it, groups are consecutive inputs.
- AWQ packs both along outputs, in the order of `_AWQ_ORDER`.

The product is exact in float32 for scales in 16 bits, and is rounded once. Sources: AutoGPTQ's,
GPTQModel's and AutoAWQ's linear layers; AutoRound writes integers in the same formats.

bitsandbytes' matrices are expanded exactly as the library does. Packed data is read as bytes,
whatever type it is stored as:

- 4 bits: numbers are stored row by row, two per byte, the first in the high half. Each is an index
  into the 16 numbers of quant_map (nf4 or fp4), multiplied by the scale of its block (absmax). With
  double quantization the scales are indices into a map of 256 numbers, with scales of blocks
  (nested_absmax) and an offset. A JSON text, stored as bytes, has the block sizes and the shape.
- 8 bits (LLM.int8): integers times the largest number of their row (SCB), divided by 127.

Sources: bitsandbytes' functional.py (QuantState) and backends/default/ops.py.

Matrices in NVFP4, and those in FP8 next to them, are read by `treegen.model.checkpoint.fp4`.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    WeightConverter,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from treegen.model.checkpoint import fp4
from treegen.model.checkpoint.fp4 import Fp4Matrix
from treegen.model.checkpoint.quantization import Packing
from treegen.ops.attention.types import FP8

_METHOD: Final = "treegen-packed"
_PARTS: Final = ("weight", "qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of eight consecutive outputs."""
_ONES: Final = 0x11111111


class Fp4Store(Protocol):
    """Keeps matrices in NVFP4 that a device computes with."""

    def start(self, model: PreTrainedModel) -> None:
        """Find the layers of a model, which has no data yet."""

    def keep(self, name: str, matrices: Sequence[Sequence[Fp4Matrix]]) -> bool:
        """Keep the matrices of a layer; return whether it can be kept.

        Args:
            name: The name of the weight in the model.
            matrices: The matrices of each expert, for each tensor that is merged into the weight;
                one list with one matrix for a linear layer.
        """

    def __deepcopy__(self, memo: Any) -> Fp4Store:
        """Return this object: transformers copies configurations."""


def dequantize_packed_on_load(
    config: PretrainedConfig, packing: Packing, fp4_store: Fp4Store | None = None
) -> None:
    """Make transformers expand packed matrices as it loads.

    Args:
        config: The configuration, which is changed.
        packing: How the matrices are packed.
        fp4_store: Keeps some of them; the module then has zeros instead. Default: None.
    """
    config.quantization_config = {
        "quant_method": _METHOD,
        "packing": packing,
        "fp4_store": fp4_store,
    }


def dequantize(
    packing: Packing, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """Return the stored matrix [K, N] in float32.

    Args:
        packing: The format.
        qweight: Integers: int32 [K / 8, N] in GPTQ, [K, N / 8] in AWQ.
        qzeros: Zeros: int32 [G, N / 8].
        scales: Scales [G, N].
        g_idx: The group of each input [K]. Default: groups of consecutive inputs.

    Raises:
        ValueError: the tensors do not fit together.
    """
    if packing.layout == "awq":
        stored_KN, zeros_GN = _unpack_words(qweight, _AWQ_ORDER), _unpack_words(qzeros, _AWQ_ORDER)
    else:
        stored_KN = _unpack_words(qweight.T, range(8)).T
        # GPTQ subtracted 1 from whole words, so a zero of 0 borrows from the next one.
        zeros_GN = _unpack_words(qzeros + (_ONES if packing.layout == "gptq" else 0), range(8))
    inputs, outputs = stored_KN.shape
    size = packing.group_size if packing.group_size > 0 else inputs
    if g_idx is None:
        if packing.shuffled:
            raise ValueError("desc_act is set, but the tensor g_idx is missing")
        g_idx = torch.arange(inputs, device=qweight.device) // size
    groups = scales.shape[0]
    if scales.shape != (groups, outputs) or zeros_GN.shape != scales.shape:
        raise ValueError(
            f"scales and zeros must have shape {[groups, outputs]}, got {[*scales.shape]} "
            f"and {[*zeros_GN.shape]}"
        )
    if groups != -(-inputs // size) or g_idx.shape != (inputs,):
        raise ValueError(f"{groups} groups of {size} do not match {inputs} inputs")
    if not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        raise ValueError(f"g_idx must have values from 0 to {groups - 1}")
    group_K = g_idx.long()
    return (stored_KN - zeros_GN[group_K]) * scales.float()[group_K]


def _unpack_words(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    """Unpack words [R, W] into integers [R, 8 W]; `order` has their positions in a word."""
    shifts = 4 * torch.tensor([*order], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


def _suffixes(packing: Packing) -> tuple[str, ...]:
    """Return the name suffixes of the tensors that may store a matrix."""
    return {"bnb-4": PARTS_4, "bnb-8": PARTS_8, "nvfp4": fp4.PARTS}.get(packing.layout, _PARTS)


def _dequantize_matrix(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the stored matrix [K, N] in float32.

    Raises:
        ValueError: the tensors do not fit together, or one is missing.
    """
    try:
        if packing.layout == "bnb-4":
            return dequantize_4bit(parts).T
        if packing.layout == "bnb-8":
            return dequantize_8bit(parts).T
        if packing.layout == "nvfp4":
            return fp4.dequantize_stored(parts).T
        if "weight" in parts:
            raise ValueError("some of these matrices are packed and some are not")
        return dequantize(packing, **parts)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a tensor is missing: {error}") from None


class _DequantizeOp(ConversionOps):  # type: ignore[misc]
    """Expands the tensors that transformers collects for one matrix or for all experts."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *_args: Any,
        full_layer_name: str,
        model: Any,
        **_options: Any,
    ) -> dict[str, Any]:
        """Expand the matrices of one layer, or of all of its experts.

        Args:
            input_dict: The stored tensors by the ends of their names, or patterns of these, each a
                tensor or a list of one tensor per expert.
            *_args: Ignored.
            full_layer_name: The name of the weight in the model.
            model: The model, whose weight has the type to expand to.
            **_options: Ignored.

        Returns:
            The expanded weights by name.

        Raises:
            ValueError: tensors do not fit together, or are missing.
        """
        packing = self.hf_quantizer.quantization_config.packing
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        is_conv1d = isinstance(model.get_submodule(full_layer_name.rpartition(".")[0]), Conv1D)
        by_matrix: dict[str, dict[str, list[Tensor]]] = defaultdict(dict)
        for pattern, value in input_dict.items():
            name = pattern.removesuffix("$")
            part = next(part for part in _suffixes(packing) if f".{name}".endswith(f".{part}"))
            by_matrix[name[: -len(part)]][part] = value if isinstance(value, list) else [value]
        weights: dict[str, Any] = {}
        is_kept = not is_conv1d and self._keep(full_layer_name, by_matrix)
        for start, parts in by_matrix.items():
            if parts.keys() == {"weight"} and parts["weight"][0].dtype not in (torch.uint8, FP8):
                weights[f"{start}weight"] = parts["weight"]
                continue
            if is_kept:
                numbers = parts.get("weight_packed", parts.get("weight", []))
                weights[f"{start}weight"] = [
                    torch.zeros((), dtype=dtype).expand(len(part), 2 * part.shape[1])
                    for part in numbers
                ]
                continue
            columns = zip(*parts.values(), strict=True)
            stored = (dict(zip(parts, column, strict=True)) for column in columns)
            matrices = (_dequantize_matrix(packing, tensors).to(dtype) for tensors in stored)
            weights[f"{start}weight"] = [
                matrix if is_conv1d else matrix.T.contiguous() for matrix in matrices
            ]
        if not all(
            matrix.is_floating_point() for matrices in weights.values() for matrix in matrices
        ):
            raise ValueError("the integer weights have no scales")
        if "weight" in weights:  # a single matrix, not one per expert
            return {full_layer_name: weights["weight"][0].to(dtype)}
        # The next operation finds each matrix by the pattern of its weight.
        end = "$" if any(pattern.endswith("$") for pattern in input_dict) else ""
        return {f"{name}{end}": matrices for name, matrices in weights.items()}

    def _keep(self, name: str, by_matrix: Mapping[str, Mapping[str, list[Tensor]]]) -> bool:
        """Give the matrices of a layer to the store; return whether it keeps them."""
        fp4_store = self.hf_quantizer.quantization_config.fp4_store
        if fp4_store is None or not all(map(fp4.is_fp4, by_matrix.values())):
            return False
        sides = [
            [
                fp4.read_fp4(dict(zip(parts, column, strict=True)))
                for column in zip(*parts.values(), strict=True)
            ]
            for parts in by_matrix.values()
        ]
        return bool(fp4_store.keep(name, sides))

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("packed weights cannot be saved")


# transformers before 5.21 takes many sources and many targets for its own classes only.
class _WeightsOp(ErnieFuseAndSplitTextVisionExperts):  # type: ignore[misc]
    """Runs an operation that requires the patterns of all its inputs, on dequantized weights.

    The patterns of the packed tensors are left out, because those were dequantized before.
    """

    supports_many_to_many = True

    def __init__(self, operation: ConversionOps) -> None:
        self._operation = operation

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], **options: Any
    ) -> dict[str, Any]:
        """Run the operation on expanded weights.

        Args:
            input_dict: The weights by the patterns of their names.
            source_patterns: These patterns, and those of the tensors that were expanded.
            **options: The operation's other arguments.
        """
        patterns = [pattern for pattern in source_patterns if pattern in input_dict]
        weights: dict[str, Any] = self._operation.convert(
            input_dict, source_patterns=patterns, **options
        )
        return weights

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("packed weights cannot be saved")


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(
        self, packing: Packing, fp4_store: Fp4Store | None = None, **settings: Any
    ) -> None:
        super().__init__(quant_method=cast(Any, _METHOD))
        self.packing, self.fp4_store = packing, fp4_store
        self.dequantize = True


@register_quantizer(_METHOD)
class _PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Makes transformers collect the tensors of each matrix and expand them."""

    is_trainable = False

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        return {"weight": [*_suffixes(self.quantization_config.packing)]}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_settings: Any
    ) -> None:
        if self.quantization_config.fp4_store is not None:
            self.quantization_config.fp4_store.start(model)

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _DequantizeOp}

    if hasattr(HfQuantizer, "get_load_operations"):

        def update_weight_conversions(
            self, weight_conversions: list[Any], model: Any = None
        ) -> list[Any]:
            updated: list[Any] = super().update_weight_conversions(weight_conversions, model)
            for converter in updated:
                operations = getattr(converter, "operations", ())
                if operations and isinstance(operations[0], _DequantizeOp):
                    converter.operations = _after_expansion(operations)
            return updated

    else:  # transformers before 5.21

        def get_weight_conversions(self) -> list[WeightConverter]:
            parts = [f"{part}$" for part in _suffixes(self.quantization_config.packing)]
            return [WeightConverter(parts, "weight", [_DequantizeOp(self)])]

        def update_weight_conversions(
            self, weight_conversions: list[Any], model: Any = None
        ) -> list[Any]:
            updated = [_dequantize_first(self, converter) for converter in weight_conversions]
            return updated + self.get_weight_conversions()

    def is_serializable(self, *_arguments: Any, **_options: Any) -> bool:
        return False


def _dequantize_first(quantizer: _PackedQuantizer, converter: Any) -> Any:
    """Let a model's converter of weights, such as a merge of experts, expand them first."""
    if not isinstance(converter, WeightConverter):
        return converter
    sources = converter.source_patterns
    if not all(source.endswith(".weight") for source in sources):
        return converter
    parts = _suffixes(quantizer.quantization_config.packing)
    return WeightConverter(
        [f"{source.removesuffix('weight')}{part}$" for source in sources for part in parts],
        converter._original_target_patterns,
        _after_expansion([_DequantizeOp(quantizer), *converter.operations]),
    )


def _after_expansion(operations: Sequence[ConversionOps]) -> list[ConversionOps]:
    """Return operations in which those that divide experts get only the expanded weights."""
    return [
        _WeightsOp(operation)
        if isinstance(operation, ErnieFuseAndSplitTextVisionExperts)
        else operation
        for operation in operations
    ]


_QUANT_STATE: Final = "weight.quant_state.bitsandbytes__"
PARTS_4: Final = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    f"{_QUANT_STATE}nf4",
    f"{_QUANT_STATE}fp4",
)
"""Name suffixes of the tensors that store a matrix in 4 bits."""
PARTS_8: Final = ("weight", "SCB", "weight_format")
"""Name suffixes of the tensors that store a matrix in 8 bits."""
_ROW_MAJOR: Final = 0
"""The only supported `weight_format`; others reorder bytes for old GPUs."""
_INVERSE_127: Final = 7.874015718698502e-3


def dequantize_4bit(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [N, K] that is stored in 4 bits, in float32.

    Raises:
        ValueError: the tensors do not fit together.
    """
    stored = next((part for name, part in parts.items() if name.startswith(_QUANT_STATE)), None)
    state = _read_quant_state(stored)
    shape = [int(size) for size in state["shape"]]
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"expected a matrix, got shape {shape}")
    count = math.prod(shape)
    pairs = parts["weight"].contiguous().view(torch.uint8).reshape(-1)
    if len(pairs) != -(-count // 2):
        raise ValueError(f"{len(pairs)} bytes do not match a 4-bit matrix of shape {shape}")
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
        raise ValueError(
            f"SCB of shape {[*largest_N.shape]} does not match an int8 matrix of shape "
            f"{[*stored_NK.shape]}"
        )
    order = parts.get("weight_format")
    if order is not None and int(order) != _ROW_MAJOR:
        raise ValueError(f"weight_format {int(order)} is not supported")
    return stored_NK * largest_N[:, None] * _INVERSE_127


def _dequantize_blocks(
    indices: Tensor, numbers: Tensor, scales: Tensor, size: Any, count: int
) -> Tensor:
    """Look up indices in `numbers` [count] and multiply by the scale of each block of `size`."""
    blocks = -(-len(indices) // max(int(size), 1))
    if int(size) < 1 or numbers.shape != (count,) or scales.shape != (blocks,):
        raise ValueError(
            f"expected {blocks} scales and {count} numbers, got {len(scales)} and {len(numbers)}"
        )
    scale = scales.float().repeat_interleave(int(size))[: len(indices)]
    return numbers.float()[indices.long()] * scale


def _read_quant_state(stored: Tensor | None) -> dict[str, Any]:
    if stored is None:
        raise ValueError("quant_state is missing")
    state = json.loads(bytes(stored.tolist()))
    if not isinstance(state, dict) or not {"shape", "blocksize"} <= state.keys():
        raise ValueError("quant_state has no shape or no blocksize")
    return state
