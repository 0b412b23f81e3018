"""How the weights of a checkpoint are quantised, and how treegen loads them.

transformers expands the formats listed here while it loads. FP8 matrices may then be restored as
they are stored, see `treegen.model.linear.fp8_checkpoint`. All other formats are refused before a
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from transformers import PretrainedConfig

from treegen.errors import ModelError, arg, install
from treegen.model.checkpoint.fp4 import GROUP
from treegen.model.checkpoint.layer_formats import formats_of, quantization_settings

_ORIGINAL: Final = "use the checkpoint that it was made from"
_OURS: Final = f"; treegen itself quantises one in 16 bits by {arg('quantization', 'fp8')}"

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
_OF_INPUTS: Final = (
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
_UNTOLD: Final[Mapping[str, str]] = {"gptq": "gptq", "awq": "gemm"}
"""The default layouts of checkpoints whose config.json does not name one."""
_UNPACKED_BITS: Final = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """How packed matrices are stored; see `treegen.model.checkpoint.packed_weights`."""

    layout: str
    """"gptq", "gptq_v2", "awq", "bnb-4", "bnb-8" or "nvfp4"."""
    group_size: int = -1
    """Inputs that share a scale; -1 for all, and for formats that store it with each matrix."""
    shuffled: bool = False
    """Whether the inputs of a group are not consecutive."""


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """How config.json describes quantised weights."""

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


def quantisation_of(config: PretrainedConfig) -> QuantizationInfo | None:
    """Return how a checkpoint's weights are quantised; None if they are not.

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
            f"weights in {method} that were rotated (transform_config) cannot be used; {_ORIGINAL}"
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
    raise ModelError(f"quantised weights ({method}) are not supported; {OTHER_REFUSED}")


def check_packages(stored: QuantizationInfo) -> None:
    """Raise ModelError if the package that reads these weights is not installed."""
    if stored.needs and find_spec(stored.needs) is None:
        raise ModelError(
            f"weights in {stored.stores} are expanded by {stored.needs}, which is not installed: "
            f"{install(_EXTRAS[stored.needs])}"
        )


def describe_support() -> dict[str, str]:
    """Return how treegen loads each kind of quantised weights, as text for users."""
    return {
        **dict.fromkeys(FP4_METHODS.values(), "in 4 bits on GPUs in bfloat16, else expanded"),
        **dict.fromkeys(FP8_METHODS.values(), "in FP8 on GPUs that multiply it, else expanded"),
        **dict.fromkeys([*EXPANDED_METHODS.values(), "GGUF"], "expanded on loading"),
        "other methods": f"refused; {OTHER_REFUSED}",
    }


def configure_dequantization(config: PretrainedConfig, stored: QuantizationInfo) -> dict[str, str]:
    """Make transformers expand the weights of a configuration; return a renaming of tensors.

    FP8 of other tools differs from transformers' own only in the names of scales, so one reader
    handles all.

    Args:
        config: The configuration, which is changed.
        stored: How the weights are quantised.

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
    """Return tensor names without input scales of quantised weights, which treegen does not need.

    Inputs are scaled as they are computed.
    """
    dropped = _OF_INPUTS if stored is not None else ()
    return [name for name in names if not name.endswith(dropped)]


def _packing(method: str, settings: dict[str, Any]) -> Packing:
    """Return the layout of a checkpoint with packed 4-bit weights.

    Raises:
        ModelError: it does not store 4 bits, or its layout is not supported.
    """

    def refuse(what: str) -> ModelError:
        return _refusal(method, what)

    names = _LAYOUTS[method]
    candidates = (settings.get(key) for key in _LAYOUT_KEYS[method])
    layout = str(
        next((candidate for candidate in candidates if candidate), _UNTOLD.get(method, "unnamed"))
    ).lower()
    if layout not in names:
        raise refuse(f"the layout {layout} (not {' or '.join(names)})")
    bits = settings.get("bits", settings.get("w_bit"))
    group_size = settings.get("group_size", settings.get("q_group_size"))
    settings_of_all = {
        "bits": bits,
        "group_size": group_size,
        "data_type": settings.get("data_type", "int"),
    }
    if bits != 4 or not isinstance(group_size, int) or group_size < -1 or group_size == 0:
        raise refuse(f"bits {bits!r} and group_size {group_size!r} (not 4, and a number)")
    if settings_of_all["data_type"] != "int" or settings.get("pack_dtype", "int32") != "int32":
        raise refuse("other numbers than integers in words of 32 bits")
    if settings.get("rotation"):
        raise refuse("rotation")
    for key in ("dynamic", "extra_config"):
        for name, overrides in (settings.get(key) or {}).items():
            if isinstance(overrides.get("bits"), int) and overrides["bits"] >= _UNPACKED_BITS:
                continue
            if any(
                overrides.get(setting, value) != value for setting, value in settings_of_all.items()
            ):
                raise refuse(f"settings of its own for {name}")
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
        raise _refusal("bitsandbytes", "load_in_4bit and load_in_8bit both or neither")
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if bits == [4] and kind not in ("nf4", "fp4"):
        raise _refusal("bitsandbytes", f"bnb_4bit_quant_type {kind!r} (not nf4 or fp4)")
    return bits[0]


def _refusal(method: str, what: str) -> ModelError:
    return ModelError(f"weights in {method} cannot be used with {what}; {_ORIGINAL}{_OURS}")


def _is_plain_fp8(settings: dict[str, Any]) -> bool:
    """Return whether all quantised weights are FP8 with scales only."""
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
