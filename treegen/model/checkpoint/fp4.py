"""Read matrices in NVFP4, and those in FP8 that one checkpoint stores along with them.

A number in NVFP4 is one of sixteen e2m1 values, two per byte, the first in the low half; times a
scale in e4m3 that 16 inputs share; times a number for the whole matrix. Two layouts:

- ModelOpt: `weight`, `weight_scale`, and `weight_scale_2`, which multiplies.
- compressed-tensors: `weight_packed`, `weight_scale`, and `weight_global_scale`, which divides.

The two scales are combined in float32 first, as both libraries do, so expanded numbers are theirs
to the bit. An FP8 matrix is `weight` in e4m3 and `weight_scale`: for all, for each output or for
blocks. Sources: ModelOpt's nvfp4_tensor.py and compressed-tensors' nvfp4 compressor.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from treegen.common.formatting import summarize_error
from treegen.errors import ModelError
from treegen.model.checkpoint.files import FLOATS, read_headers, read_object, weight_files

GROUP: Final = 16
"""Inputs that share an e4m3 scale in NVFP4."""
PARTS: Final = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
"""Name suffixes of the tensors that may store a matrix."""
_UNSUPPORTED_PARTS: Final = (
    *("pre_quant_scale", "weight_zero_point"),
    *("svdquant_lora_a", "svdquant_lora_b"),
)
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LAYOUTS: Final = {"weight_packed": "weight_global_scale", "weight": "weight_scale_2"}
"""The tensor of numbers of each layout, and that of the scale of a whole matrix."""


class Fp4Matrix(NamedTuple):
    """A matrix in NVFP4, or the matrices of several experts."""

    weight: Tensor
    """Two numbers per byte, uint8 [..., N, K / 2]."""
    scale: Tensor
    """float8_e4m3fn [..., N, K / 16]."""
    factor: Tensor
    """The factor of each output, float32 [..., N]."""


def dequantize_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """Return numbers in 4 bits times their scales as float32 [..., K].

    Args:
        weight: Two numbers per byte, uint8 [..., K / 2].
        scale: Scales of groups of inputs: uint8 exponents of powers of two with a bias of 127, or
            numbers of another type, [..., groups].
    """
    numbers = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=weight.device)
    halves = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2)
    number = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    grouped = numbers[halves.int()].unflatten(-1, (scale.shape[-1], -1))
    matrix: Tensor = (grouped * number[..., None]).flatten(-2)
    return matrix


def is_fp4(parts: Mapping[str, Any]) -> bool:
    """Return whether the tensors, by the suffixes of their names, store a matrix in NVFP4."""
    return any(
        numbers in parts and global_scale in parts for numbers, global_scale in _LAYOUTS.items()
    )


def read_fp4(parts: Mapping[str, Tensor]) -> Fp4Matrix:
    """Return a matrix in NVFP4 as it is stored.

    Args:
        parts: The tensors by the suffixes of their names.

    Raises:
        ValueError: the tensors do not fit together, or are no scales.
    """
    weight, scale, global_scale, divides = _split(parts)
    factor = global_scale.reciprocal() if divides else global_scale
    return Fp4Matrix(weight, scale, factor.expand(len(weight)))


def dequantize_stored(parts: Mapping[str, Tensor]) -> Tensor:
    """Return a matrix [N, K] in NVFP4 or FP8 in float32.

    Args:
        parts: The tensors by the suffixes of their names.

    Raises:
        ValueError: the tensors do not fit together, or are no scales.
    """
    if not is_fp4(parts):
        return _dequantize_fp8(parts)
    weight, scale, global_scale, divides = _split(parts)
    numbers = scale.float()
    return dequantize_fp4(weight, numbers / global_scale if divides else numbers * global_scale)


def _split(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return bytes, scales, the scale of the whole matrix, and whether it divides."""
    numbers = next(
        name for name, global_scale in _LAYOUTS.items() if name in parts and global_scale in parts
    )
    kinds = {name: (_dtype_name(part), tuple(part.shape)) for name, part in parts.items()}
    if why := _describe_mismatch(kinds):
        raise ValueError(why)
    global_scale = parts[_LAYOUTS[numbers]].float().reshape(())
    if not 0 < float(global_scale) < float("inf"):
        raise ValueError(
            f"{_LAYOUTS[numbers]} must be a positive number, got {float(global_scale):g}"
        )
    scale = parts["weight_scale"]
    bits = scale.view(torch.uint8)
    # 127 and 255 are no numbers; a negative scale has the highest bit, which -0.0 has too.
    if bits.numel() and int(bits.max()) > 126:
        raise ValueError("weight_scale has values that are negative or not finite")
    return parts[numbers], scale, global_scale, numbers == "weight_packed"


def _dequantize_fp8(parts: Mapping[str, Tensor]) -> Tensor:
    wide = parts["weight"]
    if wide.is_floating_point() and wide.dtype != torch.float8_e4m3fn:
        # transformers before 5.21 widens the numbers while it reads them.
        narrow = wide.to(torch.float8_e4m3fn)
        if torch.equal(narrow.to(wide.dtype), wide):
            parts = {**parts, "weight": narrow}
    kinds = {name: (_dtype_name(part), tuple(part.shape)) for name, part in parts.items()}
    if why := _describe_mismatch(kinds):
        raise ValueError(why)
    weight, grid = parts["weight"], parts["weight_scale"].float()
    if not bool((grid.isfinite() & (grid >= 0)).all()):
        raise ValueError("weight_scale has values that are negative or not finite")
    grid = grid.reshape(-1, 1) if grid.dim() < 2 else grid
    for dim, size in enumerate(weight.shape):
        grid = grid.repeat_interleave(size // grid.shape[dim], dim=dim)
    return weight.float() * grid


def _dtype_name(tensor: Tensor) -> str:
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.bfloat16: "BF16"}
    names |= {torch.float32: "F32", torch.float16: "F16", torch.float64: "F64"}
    return names.get(tensor.dtype, str(tensor.dtype))


def _describe_mismatch(kinds: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Return why tensors store no matrix; empty if they do.

    Args:
        kinds: The types, as safetensors names them, and the shapes, by the suffixes of names.
    """
    names = ", ".join(sorted(kinds))
    whole_names = [global_scale for global_scale in _LAYOUTS.values() if global_scale in kinds]
    if not whole_names and "weight_packed" not in kinds and kinds["weight"][0] != "U8":
        return _describe_fp8_mismatch(kinds)
    for numbers, global_scale in _LAYOUTS.items():
        if kinds.keys() == {numbers, "weight_scale", global_scale}:
            break
    else:
        return f"expected the three tensors of an NVFP4 matrix, got {names}"
    (kind, shape), (scale_kind, scale_shape) = kinds[numbers], kinds["weight_scale"]
    if kind != "U8" or len(shape) != 2:
        return f"{numbers} must be a matrix of type U8, got {kind} {[*shape]}"
    expected = [shape[0], 2 * shape[1] // GROUP]
    if scale_kind != "F8_E4M3" or [*scale_shape] != expected or 2 * shape[1] % GROUP:
        return f"weight_scale must be F8_E4M3 {expected}, got {scale_kind} {[*scale_shape]}"
    kind, shape = kinds[global_scale]
    if kind not in FLOATS or [*shape] not in ([], [1]):
        return f"{global_scale} must be a single floating-point number, got {kind} {[*shape]}"
    return ""


def _describe_fp8_mismatch(kinds: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    if kinds.keys() != {"weight", "weight_scale"}:
        return f"expected the two tensors of an FP8 matrix, got {', '.join(sorted(kinds))}"
    (kind, shape), (scale_kind, scale_shape) = kinds["weight"], kinds["weight_scale"]
    if kind != "F8_E4M3" or len(shape) != 2:
        return f"weight must be a matrix of type F8_E4M3, got {kind} {[*shape]}"
    grid = [*scale_shape] if len(scale_shape) == 2 else [*scale_shape, 1][-2:]
    grid = [1, 1] if not scale_shape else grid
    fits = len(scale_shape) <= 2 and all(
        num and not size % num for size, num in zip(shape, grid, strict=True)
    )
    if scale_kind not in FLOATS or not fits:
        return (
            f"weight_scale is {scale_kind} {[*scale_shape]}, which does not match the "
            f"weight's shape {[*shape]}"
        )
    return ""


class StoredSizes(NamedTuple):
    """Number and sizes of the matrices of one format."""

    matrices: int
    """Number of matrices."""
    numbers: int
    """Number of weights in them."""
    stored_bytes: int
    """Bytes in the files."""
    loaded_bytes: int
    """Bytes in memory."""


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The matrices that the headers of a checkpoint show, by the names of their modules."""

    fp4: Mapping[str, tuple[int, int]]
    """Outputs and inputs of those in NVFP4."""
    fp8: Mapping[str, tuple[int, int]]
    """Outputs and inputs of those in FP8."""
    plain: frozenset[str]
    """Modules with a matrix that is not quantized; norms and convolutions have none."""

    def sizes(self, formats: Sequence[str], itemsize: int) -> dict[str, StoredSizes]:
        """Return the sizes of matrices by format, separately for kept and dequantized ones.

        Args:
            formats: The formats that stay as they are stored, "NVFP4" and "FP8".
            itemsize: Bytes of an expanded number.
        """
        sizes: dict[str, StoredSizes] = {}
        for form, matrices in (("NVFP4", self.fp4), ("FP8", self.fp8)):
            # The output matrix is always expanded.
            for is_head in (False, True):
                shapes = [
                    shape for name, shape in matrices.items() if is_head == name.endswith("lm_head")
                ]
                numbers = sum(rows * width for rows, width in shapes)
                stored = numbers + 4 * sum(rows for rows, _ in shapes)
                if form == "NVFP4":
                    stored = numbers * 9 // 16 + 4 * sum(rows for rows, _ in shapes)
                is_kept = form in formats and not is_head
                key = f"{form} {'kept' if is_kept else 'dequantized'}"
                before = sizes.get(key, StoredSizes(0, 0, 0, 0))
                loaded = stored if is_kept else numbers * itemsize
                added = StoredSizes(len(shapes), numbers, stored, loaded)
                sizes[key] = StoredSizes(*map(sum, zip(before, added, strict=True)))
        return {key: size for key, size in sizes.items() if size.matrices}


def read_matrices(directory: Path) -> StoredMatrices:
    """Return the matrices of a checkpoint, from the headers of its files alone.

    Raises:
        ModelError: a file cannot be read, or the tensors of a matrix do not fit together.
    """
    modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for file in weight_files(directory):
        try:
            headers = list(read_headers(file))
        except Exception as error:
            raise ModelError(
                f"{file} cannot be read: {summarize_error(error)}; download it again"
            ) from None
        for name, kind, shape in headers:
            module, _, part = name.rpartition(".")
            if part in _UNSUPPORTED_PARTS:
                raise ModelError(
                    f"{directory}: {name} is not supported with NVFP4 weights; use a checkpoint "
                    f"without {name}"
                )
            if part in PARTS:
                modules[module][part] = (kind, shape)
    fp4: dict[str, tuple[int, int]] = {}
    fp8: dict[str, tuple[int, int]] = {}
    plain = set()
    for module, kinds in modules.items():
        if kinds.keys() == {"weight"} and kinds["weight"][0] in FLOATS:
            if len(kinds["weight"][1]) == 2:
                plain.add(module)
            continue
        if len(kinds) == 1 and "weight" not in kinds:
            kinds["weight"] = ("nothing", ())
        if why := _describe_mismatch(kinds):
            raise ModelError(
                f"{directory}: {module} cannot be read: {why}; download the checkpoint again"
            )
        if is_fp4(kinds):
            numbers = kinds.get("weight_packed", kinds.get("weight", ("", ())))[1]
            fp4[module] = (numbers[0], 2 * numbers[1])
        else:
            rows, width = kinds["weight"][1]
            fp8[module] = (rows, width)
    return StoredMatrices(fp4, fp8, frozenset(plain))


def read_quant_config(directory: Path) -> dict[str, Any] | None:
    """Return ModelOpt's settings from hf_quant_config.json, as `quantization_config` has them.

    Raises:
        ModelError: the file has no settings of a quantization.
    """
    file = directory / "hf_quant_config.json"
    if not file.is_file():
        return None
    settings = read_object(file).get("quantization")
    if not isinstance(settings, dict):
        raise ModelError(f"{file} has no object named quantization; download it again")
    if settings.get("quant_algo") is None and not settings.get("quantized_layers"):
        return None  # it describes stored keys and values alone
    return settings | {"quant_method": "modelopt"}
