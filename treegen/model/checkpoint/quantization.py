"""The quantization of a checkpoint's weights, and how treegen loads them.

transformers expands the formats listed here while it loads. FP8 matrices may then be restored as
they are stored, see `treegen.model.linear.fp8_checkpoint`. All other formats are refused before a
weight is read.

config.json says which layers are in NVFP4 or FP8, by name, pattern or class. ModelOpt has one
format for all linear layers but those in `exclude_modules` (wildcards), or a list of layers with a
format each (MIXED_PRECISION). compressed-tensors has groups of layers, named exactly, by a regular
expression after "re:" or by class, and a list of layers to ignore. Exact names come before
expressions, and these before classes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from treegen.common.bounded.patterns import first_matches
from treegen.errors import InputError, ModelError, arg, install
from treegen.model.checkpoint.fp4 import GROUP, StoredMatrices, read_matrices

_ALGORITHMS: Final = {"NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4", "FP8": "FP8"}
_CLASS: Final = "Linear"


def quantization_settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config of a configuration or of its text part; None for none."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings:
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return None


def formats_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the formats in settings, "NVFP4" and "FP8"; empty if there are others or none.

    Args:
        settings: The quantization_config of ModelOpt or compressed-tensors.
    """
    if settings.get("quant_method") == "modelopt":
        algorithm = settings.get("quant_algo")
        names = [algorithm]
        if algorithm == "MIXED_PRECISION":
            layers = settings.get("quantized_layers")
            layers = layers.values() if isinstance(layers, Mapping) else [None]
            names = [
                layer.get("quant_algo") if isinstance(layer, Mapping) else "" for layer in layers
            ]
        formats = [_ALGORITHMS.get(str(name), "") for name in names]
    else:
        groups = settings.get("config_groups")
        formats = [_format(group) for group in groups.values()] if isinstance(groups, dict) else []
    return sorted({*formats}, reverse=True) if all(formats) else []


def _format(group: Any) -> str:
    """Return the format of a group of compressed-tensors; empty if it is another."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or weights.get("type") != "float":
        return ""
    if weights.get("num_bits") == 8 and weights.get("strategy") not in ("group", "tensor_group"):
        return "FP8"
    return "NVFP4" if (weights.get("num_bits"), weights.get("group_size")) == (4, GROUP) else ""


def check_fp4(directory: Path, config: PretrainedConfig) -> StoredMatrices:
    """Return the matrices of a checkpoint with NVFP4, from its headers.

    Args:
        directory: The checkpoint's directory.
        config: Its configuration.

    Raises:
        ModelError: tensors do not fit together, or differ from what config.json says.
    """
    stored = read_matrices(directory)
    check_formats(quantization_settings(config) or {}, stored)
    return stored


def check_formats(settings: Mapping[str, Any], stored: StoredMatrices) -> None:
    """Check that layers are stored in the formats that config.json names.

    Layers that the tensors show to be quantized and no pattern names are read as they are stored.

    Args:
        settings: The quantization_config of ModelOpt or compressed-tensors.
        stored: The matrices of the checkpoint.

    Raises:
        ModelError: a layer is stored in another format, or a pattern cannot be matched.
    """
    names = [*stored.fp4, *stored.fp8, *sorted(stored.plain)]
    patterns, formats = _patterns(settings)
    try:
        matches = first_matches(patterns, names, "the layers in quantization_config")
    except InputError as error:
        raise ModelError(str(error)) from None
    for name, match in zip(names, matches, strict=True):
        stored_format = "NVFP4" if name in stored.fp4 else "FP8" if name in stored.fp8 else ""
        declared = "" if match is None else formats[match]
        # A pattern for all layers does not say that each of them is quantized.
        is_named = match is not None and patterns[match] != ".*"
        if declared and stored_format != declared and (stored_format or is_named):
            actual = f"in {stored_format}" if stored_format else "not quantized"
            raise ModelError(
                f"config.json says that {name} is stored in {declared}, but its tensors are "
                f"{actual}; download config.json and the weights again"
            )


def _patterns(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return regular expressions of names, and the format of each; empty for none."""
    if settings.get("quant_method") == "modelopt":
        # What ModelOpt excludes is a hint for other programs, and may name parents of layers.
        excluded = _read_names(settings.get("exclude_modules")) + _read_names(
            settings.get("ignore")
        )
        pairs = [(fnmatch.translate(name), "") for name in excluded]
        layers = settings.get("quantized_layers")
        for name, layer in layers.items() if isinstance(layers, Mapping) else ():
            pairs.append((_match_exactly(name), _ALGORITHMS.get(str(layer.get("quant_algo")), "")))
        if settings.get("quant_algo") in _ALGORITHMS:
            pairs.append((".*", _ALGORITHMS[settings["quant_algo"]]))
    else:
        pairs = [(_pattern(name), "") for name in _read_names(settings.get("ignore"))]
        groups = settings["config_groups"].values()
        targets = [
            (target, _format(group))
            for group in groups
            for target in _read_names(group.get("targets"))
        ]
        targets.sort(key=lambda target: (target[0] == _CLASS, target[0].startswith("re:")))
        pairs += [(_pattern(name), kind) for name, kind in targets]
    return [pattern for pattern, _ in pairs], [kind for _, kind in pairs]


def _pattern(target: str) -> str:
    """Return a regular expression of the names that a target or ignored name means."""
    if target.startswith("re:"):
        return target.removeprefix("re:")
    return ".*" if target == _CLASS else _match_exactly(target)


def _match_exactly(name: str) -> str:
    return re.escape(name) + r"\Z"


def _read_names(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ModelError(
            f"quantization_config must list layer names, got {str(value)[:60]!r}; download "
            "config.json again"
        )
    return [value] if isinstance(value, str) else [*value]


_USE_ORIGINAL: Final = "use the original checkpoint"
_OR_FP8: Final = f", or pass {arg('quantization', 'fp8')} with a 16-bit checkpoint"

OTHER_REFUSED: Final = "use the checkpoint in bfloat16 or float32"
EXPANDED_METHODS: Final[Mapping[str, str]] = {
    "mxfp4": "MXFP4",
    "compressed-tensors": "compressed-tensors' integers or 4 bits",
    "gptq": "GPTQ's 4 bits",
    "awq": "AWQ's 4 bits",
    "auto-round": "AutoRound's 4 bits",
    "bitsandbytes": "bitsandbytes' 4 or 8 bits",
}
"""Methods whose weights are expanded to 16 or 32 bits as they load, and their stored formats."""
FP8_METHODS: Final[Mapping[str, str]] = {
    "fp8": "FP8",
    "mxfp8": "MXFP8",
    "compressed-tensors": "compressed-tensors' FP8",
    "modelopt": "ModelOpt's FP8",
}
"""Methods whose matrices run in FP8 on GPUs that multiply FP8, and their stored formats."""
FP4_METHODS: Final[Mapping[str, str]] = {
    "compressed-tensors": "compressed-tensors' NVFP4, alone or with FP8",
    "modelopt": "ModelOpt's NVFP4, alone or with FP8",
}
"""Methods whose matrices stay in 4 bits on GPUs, and their stored formats."""
_EXTRAS: Final = {"accelerate": "fp8", "compressed_tensors": "compressed-tensors"}
_RENAMED: Final = {r"\.weight_scale$": ".weight_scale_inv"}
_INPUT_SCALES: Final = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
)


_LAYOUTS: Final[Mapping[str, Mapping[str, str]]] = {
    "gptq": {"gptq": "gptq", "gptq_v2": "gptq_v2"},
    "awq": {"gemm": "awq"},
    "auto-round": {
        **dict.fromkeys(("auto_round:gptq", "auto_round:auto_gptq"), "gptq"),
        **dict.fromkeys(("auto_round:awq", "auto_round:auto_awq"), "awq"),
    },
}
"""The layouts of packed 4-bit weights, by the name that each method uses."""
_LAYOUT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "gptq": ("checkpoint_format", "format"),
    "awq": ("version", "format"),
    "auto-round": ("packing_format", "backend"),
}
_DEFAULT_LAYOUTS: Final[Mapping[str, str]] = {"gptq": "gptq", "awq": "gemm"}
"""The default layouts of checkpoints whose config.json does not name one."""
_UNPACKED_BITS: Final = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage format of packed matrices; see `treegen.model.checkpoint.dequantization`."""

    layout: str
    """"gptq", "gptq_v2", "awq", "bnb-4", "bnb-8" or "nvfp4"."""
    group_size: int = -1
    """Inputs that share a scale; -1 for all, and for formats that store it with each matrix."""
    shuffled: bool = False
    """Whether the inputs of a group are not consecutive."""


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """The quantization that config.json describes."""

    method: str
    """The method's name in config.json."""
    stores: str
    """The format's name for messages."""
    is_fp8: bool = False
    """Whether matrices are FP8 numbers times scales."""
    needs: str = ""
    """The package that transformers needs to read it; empty for none."""
    packing: Packing | None = None
    """The layout of packed matrices; None for other methods."""

    @property
    def is_fp4(self) -> bool:
        """Whether matrices are in NVFP4; some may be in FP8."""
        return self.packing is not None and self.packing.layout == "nvfp4"


def quantization_of(config: PretrainedConfig) -> QuantizationInfo | None:
    """Return how a checkpoint's weights are quantized; None if they are not.

    Raises:
        ModelError: treegen cannot read them.
    """
    settings = quantization_settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method is None and {"load_in_4bit", "load_in_8bit"} & settings.keys():
        method = "bitsandbytes"  # the only method when quant_method did not exist
    method = str(getattr(method, "value", method))
    if settings.get("transform_config"):
        raise ModelError(
            f"{method} weights with rotation (transform_config) are not supported; {_USE_ORIGINAL}"
        )
    formats = formats_of(settings | {"quant_method": method}) if method in FP4_METHODS else []
    if "NVFP4" in formats:
        return QuantizationInfo(method, " and ".join(formats), packing=Packing("nvfp4", GROUP))
    if method in FP8_METHODS and (method in ("fp8", "mxfp8") or _is_plain_fp8(settings)):
        return QuantizationInfo(method, FP8_METHODS[method], is_fp8=True, needs="accelerate")
    if method in EXPANDED_METHODS:
        needs = "compressed_tensors" if method == "compressed-tensors" else ""
        if method == "bitsandbytes":
            bits = _bits_of_bitsandbytes(settings)
            return QuantizationInfo(
                method, f"{method}' {bits} bits", packing=Packing(f"bnb-{bits}")
            )
        packing = _packing(method, settings) if method in _LAYOUTS else None
        return QuantizationInfo(method, EXPANDED_METHODS[method], needs=needs, packing=packing)
    raise ModelError(f"quantized weights ({method}) are not supported; {OTHER_REFUSED}")


def check_packages(stored: QuantizationInfo) -> None:
    """Raise ModelError if the package that reads these weights is not installed."""
    if stored.needs and find_spec(stored.needs) is None:
        raise ModelError(
            f"dequantizing weights in {stored.stores} requires {stored.needs}: "
            f"{install(_EXTRAS[stored.needs])}"
        )


def describe_support() -> dict[str, str]:
    """Return how treegen loads each kind of quantized weights, as text for users."""
    return {
        **dict.fromkeys(FP4_METHODS.values(), "in 4 bits on GPUs in bfloat16, else dequantized"),
        **dict.fromkeys(FP8_METHODS.values(), "in FP8 on GPUs that multiply it, else dequantized"),
        **dict.fromkeys([*EXPANDED_METHODS.values(), "GGUF"], "dequantized on loading"),
        "other methods": f"refused; {OTHER_REFUSED}",
    }


def configure_dequantization(config: PretrainedConfig, stored: QuantizationInfo) -> dict[str, str]:
    """Make transformers expand the weights of a configuration; return a renaming of tensors.

    FP8 of other tools differs from transformers' own only in the names of scales, so one reader
    handles all.

    Args:
        config: The configuration, which is changed.
        stored: How the weights are quantized.

    Returns:
        Regular expressions of tensor names, and their replacements.
    """
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if not isinstance(settings, dict):
            continue
        settings["dequantize"] = True
        if stored.is_fp8 and stored.method not in ("fp8", "mxfp8"):
            part.quantization_config = {"quant_method": "fp8", "dequantize": True}
    return _RENAMED if stored.is_fp8 else {}


def unused_names(names: Iterable[str], stored: QuantizationInfo | None) -> list[str]:
    """Return tensor names without input scales of quantized weights, which treegen does not need.

    Inputs are scaled as they are computed.
    """
    dropped = _INPUT_SCALES if stored is not None else ()
    return [name for name in names if not name.endswith(dropped)]


def _packing(method: str, settings: dict[str, Any]) -> Packing:
    """Return the layout of a checkpoint with packed 4-bit weights.

    Raises:
        ModelError: it does not store 4 bits, or its layout is not supported.
    """
    refuse, names = partial(_refusal, method), _LAYOUTS[method]
    named = [settings[key] for key in _LAYOUT_KEYS[method] if settings.get(key)]
    layout = str([*named, _DEFAULT_LAYOUTS.get(method, "unnamed")][0]).lower()
    if layout not in names:
        raise refuse(f"the layout {layout} (expected {' or '.join(names)})")
    bits = settings.get("bits", settings.get("w_bit"))
    group_size = settings.get("group_size", settings.get("q_group_size"))
    default_settings = {
        "bits": bits,
        "group_size": group_size,
        "data_type": settings.get("data_type", "int"),
    }
    if bits != 4 or not isinstance(group_size, int) or group_size < -1 or group_size == 0:
        raise refuse(
            f"bits {bits!r} and group_size {group_size!r} (bits must be 4, and group_size must "
            "be -1 or a positive integer)"
        )
    if default_settings["data_type"] != "int" or settings.get("pack_dtype", "int32") != "int32":
        raise refuse("a data_type other than int, or a pack_dtype other than int32")
    if settings.get("rotation"):
        raise refuse("rotation")
    for key in ("dynamic", "extra_config"):
        by_layer = settings.get(key) or {}
        if not isinstance(by_layer, Mapping):
            raise refuse(f"{key} {str(by_layer)[:60]!r} (expected an object of layers)")
        for layer, overrides in by_layer.items():
            if not isinstance(overrides, Mapping):
                raise refuse(f"{key} {str(overrides)[:60]!r} for {layer} (expected an object)")
            if isinstance(overrides.get("bits"), int) and overrides["bits"] >= _UNPACKED_BITS:
                continue
            if any(overrides.get(name, value) != value for name, value in default_settings.items()):
                raise refuse(f"separate settings for {layer}")
    shuffled = method == "gptq" and bool(settings.get("desc_act"))
    return Packing(names[layout], group_size, shuffled)


def _bits_of_bitsandbytes(settings: dict[str, Any]) -> int:
    """Return the bits of a bitsandbytes checkpoint; its matrices contain all other settings.

    Raises:
        ModelError: the settings do not select exactly one of 4 and 8 bits, or name an unknown
            number format.
    """
    bits = [num for num in (4, 8) if settings.get(f"load_in_{num}bit")]
    if len(bits) != 1:
        raise _refusal("bitsandbytes", "load_in_4bit and load_in_8bit both set or both unset")
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if bits == [4] and kind not in ("nf4", "fp4"):
        raise _refusal("bitsandbytes", f"bnb_4bit_quant_type {kind!r} (expected nf4 or fp4)")
    return bits[0]


def _refusal(method: str, what: str) -> ModelError:
    return ModelError(f"{method} weights with {what} are not supported; {_USE_ORIGINAL}{_OR_FP8}")


def _is_plain_fp8(settings: dict[str, Any]) -> bool:
    """Return whether all quantized weights are FP8 with scales only."""
    if settings.get("quant_method") == "modelopt":
        return settings.get("quant_algo") == "FP8"
    groups = settings.get("config_groups")
    sparse = settings.get("sparsity_config")
    if not isinstance(groups, dict) or not groups:
        return False
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        return False
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return len(weights) == len(groups) and all(
        isinstance(weight, dict) and (weight.get("type"), weight.get("num_bits")) == ("float", 8)
        for weight in weights
    )
