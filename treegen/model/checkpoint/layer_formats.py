"""Which layers of a checkpoint config.json says to be in NVFP4 or FP8, by name, pattern or class.

ModelOpt has one format for all linear layers but those in `exclude_modules` (wildcards), or a list
of layers with a format each (MIXED_PRECISION). compressed-tensors has groups of layers, named
exactly, by a regular expression after "re:" or by class, and a list of layers to ignore. Exact
names come before expressions, and these before classes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from treegen.common.bounded.patterns import first_matches
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.fp4 import GROUP, StoredMatrices, read_headers

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
    stored = read_headers(directory)
    check_formats(quantization_settings(config) or {}, stored)
    return stored


def check_formats(settings: Mapping[str, Any], stored: StoredMatrices) -> None:
    """Check that layers are stored in the formats that config.json names.

    Layers that the tensors show to be quantised and no pattern names are read as they are stored.

    Args:
        settings: The quantization_config of ModelOpt or compressed-tensors.
        stored: The matrices of the checkpoint.

    Raises:
        ModelError: a layer is stored in another format, or a pattern cannot be matched.
    """
    names = [*stored.fp4, *stored.fp8, *sorted(stored.plain)]
    patterns, formats = _patterns(settings)
    try:
        places = first_matches(patterns, names, "the layers in quantization_config")
    except InputError as error:
        raise ModelError(str(error)) from None
    for name, place in zip(names, places, strict=True):
        there = "NVFP4" if name in stored.fp4 else "FP8" if name in stored.fp8 else ""
        want = "" if place is None else formats[place]
        if want and there != want and (there or patterns[place or 0] != ".*"):
            raise ModelError(
                f"config.json says that {name} is stored in {want}, and its tensors are "
                f"{f'in {there}' if there else 'not quantised'}; download both again"
            )


def _patterns(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return regular expressions of names, and the format of each; empty for none."""
    if settings.get("quant_method") == "modelopt":
        # What ModelOpt excludes is a hint for other programs, and may name parents of layers.
        excluded = _texts(settings.get("exclude_modules")) + _texts(settings.get("ignore"))
        pairs = [(fnmatch.translate(name), "") for name in excluded]
        layers = settings.get("quantized_layers")
        for name, layer in layers.items() if isinstance(layers, Mapping) else ():
            pairs.append((_exact(name), _ALGORITHMS.get(str(layer.get("quant_algo")), "")))
        if settings.get("quant_algo") in _ALGORITHMS:
            pairs.append((".*", _ALGORITHMS[settings["quant_algo"]]))
    else:
        pairs = [(_pattern(name), "") for name in _texts(settings.get("ignore"))]
        groups = settings["config_groups"].values()
        targets = [
            (target, _format(group)) for group in groups for target in _texts(group.get("targets"))
        ]
        targets.sort(key=lambda target: (target[0] == _CLASS, target[0].startswith("re:")))
        pairs += [(_pattern(name), kind) for name, kind in targets]
    return [pattern for pattern, _ in pairs], [kind for _, kind in pairs]


def _pattern(target: str) -> str:
    """Return a regular expression of the names that a target or ignored name means."""
    if target.startswith("re:"):
        return target.removeprefix("re:")
    return ".*" if target == _CLASS else _exact(target)


def _exact(name: str) -> str:
    return re.escape(name) + r"\Z"


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ModelError(
            f"quantization_config has {str(value)[:60]!r} where names of layers belong; download "
            "config.json again"
        )
    return [value] if isinstance(value, str) else [*value]
