"""Merge PEFT's low-rank adapters into the weights of their base model as it loads.

LoRA (https://arxiv.org/abs/2106.09685) adds s B A to a matrix W, with s = alpha / r, or alpha /
sqrt(r) in rsLoRA (https://arxiv.org/abs/2312.03732). DoRA (https://arxiv.org/abs/2402.09353) then
rescales each row of the sum to a learned length. Everything is computed in float32.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treegen.common.bounded.patterns import first_matches
from treegen.common.checks import is_finite
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.files import locate, read_object, summarize_error

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PARTS: Final = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$"
)
# Settings that are used below, that the tensor names also show, or that do not affect merging.
_KNOWN: Final = frozenset(
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
        for pattern, alpha in value.items():
            re.compile(pattern)
            float(alpha)
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError, re.error):
        return False
    return True


_SWITCH: Final = ("true or false", lambda value: isinstance(value, bool))
_TYPES: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "lora_alpha": ("a number", _is_number),
    "alpha_pattern": ("an object from patterns of modules to numbers", _are_patterns),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), _SWITCH),
}
_INSTEAD: Final = "merge it with peft (merge_and_unload) and save_pretrained, and give that model"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can be merged.

    Attributes:
        directory: The adapter's directory.
        config: Its adapter_config.json.
    """

    directory: Path
    config: Mapping[str, Any]

    def alphas(self, modules: Sequence[str]) -> dict[str, float]:
        """Return the alpha of each module.

        Args:
            modules: Module names in the base model.

        Raises:
            ModelError: `alpha_pattern` has no regular expressions, or they take too long.
        """
        stored = self.config.get("lora_alpha")
        usual = 8.0 if stored is None else float(stored)
        overrides = self.config.get("alpha_pattern") or {}
        patterns = [rf"(.*\.)?({pattern})$" for pattern in overrides]
        try:
            places = first_matches(patterns, modules, f"alpha_pattern of {self.directory / CONFIG}")
        except InputError as error:
            raise ModelError(str(error)) from None
        values = [float(value) for value in overrides.values()]
        return {
            module: usual if place is None else values[place]
            for module, place in zip(modules, places, strict=True)
        }

    def scale(self, alpha: float, rank: int) -> float:
        """Return the factor of the product of a module's two matrices.

        Args:
            alpha: The alpha of the module.
            rank: The rank of the matrices.
        """
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def find_adapter(path: str | os.PathLike[str], *, weights: bool = True) -> Adapter:
    """Return the adapter in a directory or with a hub name.

    Args:
        path: A directory or a hub name.
        weights: Whether to fetch its weights from the hub too.

    Raises:
        ModelError: there is no adapter, or it cannot be merged.
    """
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
        raise ModelError(f"{directory} has no {CONFIG}; give a directory that peft has saved")
    config = read_object(directory / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{directory} is an adapter of the kind {kind}; only LORA is merged; or {_INSTEAD}"
        )
    other = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if other:
        raise ModelError(f"the adapter in {directory} uses {', '.join(other)}; {_INSTEAD}")
    for name, (what, is_right) in _TYPES.items():
        if config.get(name) is not None and not is_right(config[name]):
            raise ModelError(
                f"{directory / CONFIG}: {name} is {config[name]!r:.60}, not {what}; mend it, or "
                "save the adapter again with peft"
            )
    if weights and not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"{directory} has no {WEIGHTS}; save the adapter again with peft, whose default is "
            "safetensors"
        )
    return Adapter(directory, config)


def merge(module: nn.Module, adapter: Adapter, dropped: Sequence[str] = ()) -> int:
    """Merge an adapter into a module's weights and return the number of changed tensors.

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
    by_module: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    has_dropped = False
    try:
        with safe_open(adapter.directory / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                place = name.removeprefix(_PREFIX)
                if place.startswith(tuple(f"{part}." for part in dropped)):
                    has_dropped = True
                    continue
                if part := _PARTS.search(place):
                    by_module.setdefault(place[: part.start()], {})[part[1]] = file.get_tensor(name)
                else:
                    # An adapter of an embedding may also contain the embedding's base weight.
                    whole[place.replace(".base_layer.", ".")] = file.get_tensor(name)
    except Exception as error:
        raise ModelError(
            f"{adapter.directory / WEIGHTS} cannot be read: {summarize_error(error)}; copy it again"
        ) from None
    if not by_module and not whole and not has_dropped:
        raise ModelError(
            f"{adapter.directory / WEIGHTS} has no tensors; save the adapter again with peft"
        )
    modules = dict(module.named_modules())
    shared = _find_shared_parameters(module)
    for place, tensor in whole.items():
        name, _, kind = place.rpartition(".")
        mine = getattr(modules.get(name), kind, None)
        if not isinstance(mine, nn.Parameter):
            raise _strange(adapter, place)
        if mine.shape != tensor.shape:
            raise ModelError(
                f"{adapter.directory} has {place} of shape {list(tensor.shape)}, and the model "
                f"{list(mine.shape)}; {_INSTEAD}"
            )
        _replace(modules[name], kind, tensor, shared)
    alphas = adapter.alphas(list(by_module))
    for name, parts in by_module.items():
        base = getattr(modules.get(name), "weight", None)
        if not isinstance(base, nn.Parameter) or base.ndim != 2:
            raise _strange(adapter, name)
        merged = _merge_weight(base.data, parts, name, adapter, alphas[name])
        _replace(modules[name], "weight", merged, shared)
    return len(by_module) + len(whole)


def _merge_weight(
    base: Tensor, parts: Mapping[str, Tensor], name: str, adapter: Adapter, alpha: float
) -> Tensor:
    """Return a weight with its part of the adapter merged, in float32."""
    embedded = "lora_embedding_A" in parts
    first = parts.get("lora_embedding_A" if embedded else "lora_A")
    second = parts.get("lora_embedding_B" if embedded else "lora_B")
    if first is None or second is None or first.ndim != 2 or second.ndim != 2:
        raise ModelError(f"{adapter.directory} has no two matrices for {name}; {_INSTEAD}")
    if not len(first):
        raise ModelError(
            f"{adapter.directory} has matrices of rank 0 for {name}, which change nothing; save "
            "the adapter again with peft, with r of 1 or more"
        )
    # The matrices of an embedding are stored transposed: it adds the transpose of B A.
    # The weights of GPT-2's Conv1D have inputs first.
    turned = embedded or bool(adapter.config.get("fan_in_fan_out"))
    weight = (base.T if turned else base).to(torch.float32)
    if (second.shape[0], first.shape[1]) != tuple(weight.shape) or second.shape[1] != len(first):
        raise ModelError(
            f"{adapter.directory} is of another model: its matrices for {name} give "
            f"{second.shape[0]} x {first.shape[1]}, and the weight is "
            f"{' x '.join(map(str, base.shape))}"
        )
    change = second.to(weight) @ first.to(weight)
    weight = weight + adapter.scale(alpha, len(first)) * change
    if (lengths := parts.get("lora_magnitude_vector")) is not None:
        weight = weight * (lengths.to(weight).flatten() / weight.norm(dim=1))[:, None]
    return weight.T if turned else weight


def _strange(adapter: Adapter, name: str) -> ModelError:
    named = adapter.config.get("base_model_name_or_path")
    return ModelError(
        f"{adapter.directory} changes {name}, which the model does not have; the adapter is of "
        f"{named or 'another model'}; give that model"
    )


def _find_shared_parameters(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules share."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _replace(module: nn.Module, kind: str, value: Tensor, shared: set[int]) -> None:
    old: nn.Parameter = getattr(module, kind)
    value = value.to(old.device, old.dtype).contiguous()
    if id(old) in shared:
        setattr(module, kind, nn.Parameter(value, requires_grad=False))
    else:
        old.data.copy_(value)
