"""Merge PEFT's low-rank adapters into the weights of their base model as it loads.

peft computes the sums of LoRA (https://arxiv.org/abs/2106.09685), rsLoRA
(https://arxiv.org/abs/2312.03732) and DoRA (https://arxiv.org/abs/2402.09353). This file checks the
adapter, has each sum computed in float32, and rounds it once to the type of the weight.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treegen.common.bounded.patterns import first_matches
from treegen.common.checks import is_finite
from treegen.common.formatting import summarize_error
from treegen.errors import InputError, ModelError, install
from treegen.model.checkpoint.files import FieldChecks, check_fields, locate, read_object

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
# Settings that are used below, that the tensor names also show, or that do not affect merging.
_MERGEABLE: Final = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
        "bias",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "ensure_weight_tying",
        "qalora_group_size",
    }
)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and is_finite(value)


def _are_patterns(value: Any) -> bool:
    try:
        for pattern in value:
            re.compile(pattern)
        return all(is_finite(float(alpha)) for alpha in value.values())
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError, re.error):
        return False


_SWITCHES: Final = ("use_rslora", "use_dora", "fan_in_fan_out")
_FIELD_CHECKS: Final[FieldChecks] = {
    "lora_alpha": ("a number", _is_number),
    "alpha_pattern": ("an object that maps module patterns to numbers", _are_patterns),
    **dict.fromkeys(_SWITCHES, ("true or false", lambda value: isinstance(value, bool))),
}
# Initialisations that leave the base weights unchanged.
_PLAIN_INITS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
_ADVICE: Final = (
    "merge the adapter with peft (merge_and_unload), save the model, and pass the saved model"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can be merged."""

    directory: Path
    """The adapter's directory."""
    config: Mapping[str, Any]
    """Its adapter_config.json."""

    def alphas(self, modules: Sequence[str]) -> dict[str, float]:
        """Return the alpha of each module.

        Args:
            modules: Module names in the base model.

        Raises:
            ModelError: `alpha_pattern` has no regular expressions, or they take too long.
        """
        stored = self.config.get("lora_alpha")
        default_alpha = 8.0 if stored is None else float(stored)
        overrides = self.config.get("alpha_pattern") or {}
        patterns = [rf"(.*\.)?({pattern})$" for pattern in overrides]
        try:
            matches = first_matches(
                patterns, modules, f"alpha_pattern of {self.directory / CONFIG}"
            )
        except InputError as error:
            raise ModelError(str(error)) from None
        values = [float(value) for value in overrides.values()]
        return {
            module: default_alpha if match is None else values[match]
            for module, match in zip(modules, matches, strict=True)
        }


def find_adapter(path: str | os.PathLike[str], *, weights: bool = True) -> Adapter:
    """Return the adapter in a directory or with a hub name.

    Args:
        path: A directory or a hub name.
        weights: Whether to fetch its weights from the hub too.

    Raises:
        ModelError: peft is not installed, there is no adapter, or it cannot be merged.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"merging an adapter requires peft: {install('lora')}")
    return read_adapter(locate(path, None, weights=weights), weights=weights)


def read_adapter(directory: Path, *, weights: bool = True) -> Adapter:
    """Return the adapter in a directory that PEFT has written, without reading its tensors.

    Args:
        directory: The adapter's directory.
        weights: Whether its weights must exist.

    Raises:
        ModelError: there is no adapter, it is of another kind, or its weights are not safetensors.
    """
    if not (directory / CONFIG).is_file():
        raise ModelError(f"{directory} has no {CONFIG}; pass a directory saved by peft")
    config = read_object(directory / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"the adapter in {directory} has peft_type {kind}, but only LORA is supported; "
            f"{_ADVICE}"
        )
    other = sorted(name for name, value in config.items() if value and name not in _MERGEABLE)
    if other:
        raise ModelError(
            f"the adapter in {directory} uses unsupported settings: {', '.join(other)}; {_ADVICE}"
        )
    if (init := config.get("init_lora_weights")) not in _PLAIN_INITS:
        raise ModelError(
            f"the adapter in {directory} was initialized with init_lora_weights={init!r:.20}, "
            f"which changes the weights of the base model; {_ADVICE}"
        )
    given = {name: value for name, value in config.items() if value is not None}
    advice = "fix the file, or save the adapter again with peft"
    check_fields(directory / CONFIG, given, _FIELD_CHECKS, advice)
    if weights and not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"{directory} has no {WEIGHTS}; save the adapter again with peft in the safetensors "
            "format"
        )
    return Adapter(directory, config)


def merge(module: nn.Module, adapter: Adapter, dropped: Sequence[str] = ()) -> None:
    """Merge an adapter into a module's weights.

    A changed weight that several modules share, such as that of a tied head, is replaced only in
    the module that the adapter names.

    Args:
        module: The base model.
        adapter: The adapter.
        dropped: Names of parts that were removed from the module, such as an image tower. The
            adapter's tensors for them are ignored.

    Raises:
        ModelError: the adapter belongs to another model, or cannot be read.
    """
    layers = dict(module.named_modules())
    prefixes = tuple(f"{part}." for part in dropped)
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(adapter).items():
        if name.startswith(prefixes):
            continue
        layer, separator, part = name.partition(".lora_")
        if not separator:
            _replace_parameter(layers, name, tensor, adapter)
        elif layer in layers:
            matrices.setdefault(layer, {})[f"lora_{part}"] = tensor
        else:
            raise _unknown_name(adapter, layer)
    alphas = adapter.alphas(list(matrices))
    for name, parts in matrices.items():
        rank = len(parts.get("lora_A.weight", parts.get("lora_embedding_A", ())))
        if not rank:
            raise ModelError(
                f"the adapter in {adapter.directory} must have two matrices of rank 1 or more "
                f"for {name}; save the adapter again with peft"
            )
        try:
            _merge_matrices(layers[name], parts, adapter.config, rank, alphas[name])
        except Exception as error:
            raise ModelError(
                f"the adapter matrices in {adapter.directory} for {name} cannot be merged: "
                f"{summarize_error(error)}; the adapter is corrupt or was trained for another "
                "model; save the adapter again with peft, or pass its base model"
            ) from None


def _read_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file by their names in the base model."""
    path = adapter.directory / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tensors = {name.removeprefix(_PREFIX): file.get_tensor(name) for name in names}
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read: {summarize_error(error)}; copy the file again"
        ) from None
    if not tensors:
        raise ModelError(f"{path} has no tensors; save the adapter again with peft")
    return tensors


def _replace_parameter(
    modules: Mapping[str, nn.Module], name: str, tensor: Tensor, adapter: Adapter
) -> None:
    """Replace a parameter that the adapter holds in full, such as that of a trained head."""
    # An adapter of an embedding may also contain the embedding's base weight.
    owner, _, kind = name.replace(".base_layer.", ".").rpartition(".")
    old = getattr(modules.get(owner), kind, None)
    if not isinstance(old, nn.Parameter):
        raise _unknown_name(adapter, name)
    if old.shape != tensor.shape:
        raise ModelError(
            f"{name} in {adapter.directory} has shape {list(tensor.shape)}, but the model "
            f"expects {list(old.shape)}; {_ADVICE}"
        )
    value = tensor.to(old.device, old.dtype).contiguous()
    setattr(modules[owner], kind, nn.Parameter(value, requires_grad=False))


@torch.no_grad()
def _merge_matrices(
    layer: nn.Module,
    matrices: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    rank: int,
    alpha: float,
) -> None:
    """Merge low-rank matrices into the weight of a layer, by peft.

    Args:
        layer: A layer of the base model.
        matrices: The matrices, by the names that peft has for them.
        settings: The adapter's adapter_config.json.
        rank: The rank of the matrices.
        alpha: The alpha of this layer.

    Raises:
        ValueError: The matrices do not belong together.
        RuntimeError: They do not fit the layer.
    """
    from peft import LoraConfig, LoraModel, set_peft_model_state_dict

    options: dict[str, Any] = {name: bool(settings.get(name)) for name in _SWITCHES}
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=["layer"], **options)
    # peft sees one layer at a time, so that only one weight is held in float32.
    container = nn.Module()
    container.layer = layer
    weight = cast(Tensor, layer.weight)
    # A copy, because other layers may share the weight.
    layer.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
    state = {f"layer.{name}": tensor.to(torch.float32) for name, tensor in matrices.items()}
    # peft draws matrices before it loads these.
    with torch.random.fork_rng(devices=[]):
        tuner = LoraModel(container, config, "default", low_cpu_mem_usage=True)
    # peft declares a type that has no fields.
    loaded: Any = set_peft_model_state_dict(container, state, low_cpu_mem_usage=True)
    missing = [name for name in loaded.missing_keys if ".lora_" in name]
    if missing or loaded.unexpected_keys:
        raise ValueError(f"missing: {missing}, not expected: {loaded.unexpected_keys}")
    tuner.merge_and_unload()
    merged = cast(Tensor, layer.weight).to(weight.dtype).contiguous()
    layer.weight = nn.Parameter(merged, requires_grad=False)


def _unknown_name(adapter: Adapter, name: str) -> ModelError:
    base = adapter.config.get("base_model_name_or_path")
    return ModelError(
        f"the adapter in {adapter.directory} changes {name}, but the model has no weight with "
        f"this name; use {base or 'the model'}, for which the adapter was trained"
    )
