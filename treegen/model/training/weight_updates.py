"""New weights for a loaded model: all are checked before the first one is written.

A model reads its weights at fixed addresses, also through merged layers and CUDA graphs. So new
weights are copied into the old ones.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from treegen.common.formatting import summarize_error
from treegen.errors import InputError, ModelError, arg
from treegen.model.checkpoint.files import check_weights, fingerprint, locate
from treegen.model.checkpoint.load_report import format_names, quiet_loading
from treegen.model.checkpoint.quantization import quantization_of
from treegen.model.checkpoint.text_part import drop_parts
from treegen.model.config import read_config
from treegen.model.linear.fp4 import FourBitExperts, Fp4Linear
from treegen.model.linear.fp8 import Fp8Linear, quantize_in_chunks
from treegen.model.linear.fp8_experts import Fp8Experts
from treegen.model.model import Model
from treegen.model.parallel.ranks import Ranks
from treegen.model.training.trainable import strip_adapters
from treegen.model.weights import LoadPlan, load_weights

NewWeights = (
    str | os.PathLike[str] | nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
)
"""A checkpoint's directory, a module, or tensors with their names."""
_BASE: Final = ".base_layer"
_SAVED: Final = ".original_module"
"""Parts of the names of weights that PEFT has wrapped, and of those that it replaces."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """New weights that fit a model, or the shard of one that this process has."""

    writes: list[tuple[Tensor, Tensor]]
    """Each weight of the model, and what to copy into it."""
    fingerprint: str
    """As `Model.fingerprint`."""

    def write(self) -> None:
        """Copy the new weights into those of the model."""
        for target, source in self.writes:
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                target.copy_(source)


def stage_weights(model: Model, weights: NewWeights, *, check_finite: bool = True) -> StagedWeights:
    """Check new weights against the weights of a model, which stay as they are.

    Args:
        model: The model.
        weights: As for `LLM.update`.
        check_finite: Whether to refuse NaN and infinities, as `LLM.update` does.

    Returns:
        The weights, ready to be written. Those in FP8 are rounded already.

    Raises:
        InputError: the weights do not fit the model.
        ModelError: the model's weights cannot be updated, or the checkpoint cannot be read.
    """
    _check_updatable(model)
    targets, required, scales = _list_targets(model.module)
    sources, digest = _match_weights(model, weights, targets, required, model.ranks, check_finite)
    writes: list[tuple[Tensor, Tensor]] = []
    for name, tensor in sources.items():
        target, scale = targets[name], scales.get(id(targets[name]))
        if scale is None:
            if tensor.data_ptr() != target.data_ptr():
                writes.append((target, tensor))
            continue
        rows = tensor.to(model.dtype).flatten(0, -2)
        rounded, scale_R = quantize_in_chunks(rows, tensor.device)
        writes += [(target, rounded.view(target.shape)), (scale, scale_R.view(scale.shape))]
    return StagedWeights(writes, digest)


def save_whole(
    model: Model, weights: NewWeights, folder: Path, *, check_finite: bool = True
) -> str:
    """Check new weights of a model that several processes have, and save those that are in memory.

    Args:
        model: The model of rank 0.
        weights: As for `LLM.update`.
        folder: Where to save a checkpoint, unless the weights are one.
        check_finite: Whether to refuse NaN and infinities, as `LLM.update` does.

    Returns:
        The fingerprint of the checkpoint that was given; empty if none was.

    Raises:
        InputError: the weights do not fit the model.
        ModelError: the model's weights cannot be updated, or the checkpoint cannot be read.
    """
    _check_updatable(model)
    with torch.device("meta"):
        stock_model = type(model.module)._from_config(_plain_config(model), dtype=model.dtype)
    drop_parts(stock_model, _unloaded_prefixes(model))
    targets, required, _ = _list_targets(stock_model)
    sources, digest = _match_weights(model, weights, targets, required, None, check_finite)
    if isinstance(weights, str | os.PathLike):
        return digest
    by_target = {id(targets[name]): tensor for name, tensor in sources.items()}
    current = model.module.state_dict()  # for buffers that are not given
    state = {
        name: by_target[id(target)].to(target.dtype) if id(target) in by_target else current[name]
        for name, target in targets.items()
    }
    stock_model.load_state_dict(state, assign=True)
    stock_model.save_pretrained(folder)
    return digest


def _match_weights(
    model: Model,
    weights: NewWeights,
    targets: Mapping[str, Tensor],
    required: Mapping[str, Tensor],
    ranks: Ranks | None,
    check_finite: bool,
) -> tuple[dict[str, Tensor], str]:
    """Return new weights by name, one for each target, and the fingerprint of their checkpoint.

    Args:
        model: The model.
        weights: As for `LLM.update`.
        targets: The weights to write, by name.
        required: Those that must be given.
        ranks: The processes, if the targets are the shard of this one.
        check_finite: Whether to refuse NaN and infinities, as `LLM.update` does.

    Raises:
        InputError: the weights do not fit the targets.
        ModelError: the checkpoint cannot be read.
    """
    digest = ""
    if isinstance(weights, nn.Module):
        part = strip_adapters(weights)
        if isinstance(config := getattr(part, "config", None), PretrainedConfig):
            check_settings(model, config, "the module's config")
        tensors = _tensors_of(part, targets)
    elif isinstance(weights, str | os.PathLike):
        tensors, digest = _read_checkpoint(model, weights, ranks)
    else:
        tensors = _collect(weights, targets)
        if any(name not in targets for name in _loaded_names(tensors, targets, model)):
            tensors = _convert_checkpoint_tensors(model, tensors)
    tensors = {name: tensors[name] for name in _loaded_names(tensors, targets, model)}
    _check_names(tensors, targets, required)
    sources: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        target = targets[name]
        _check_tensor(name, tensor, target)
        if check_finite:
            _check_finite(name, tensor, target, model)
        other, before = sources.setdefault(id(target), (name, tensor))
        if before is not tensor and not _is_equal(before, tensor):
            raise InputError(
                f"{other} and {name} differ, but the model has one weight for both names; pass "
                "only one of the two tensors"
            )
    return dict(sources.values()), digest


def _check_updatable(model: Model) -> None:
    """Raise ModelError if a model has weights that cannot be updated."""
    if model.fixed_because:
        raise ModelError(model.fixed_because)
    for name, part in model.module.named_modules():
        if isinstance(part, Fp4Linear | FourBitExperts):
            raise ModelError(
                f"the 4-bit weights of {name} cannot be updated; load the model with "
                f"{arg('quantization', 'none')}"
            )


def _list_targets(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, Any]]:
    """Return the weights of a module by name, those that must be given, and scales of FP8 weights.

    The scales are by id of the weight. Buffers need not be given.
    """
    scales: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, Fp8Linear):
            scales[id(part.weight)] = part.scale
        elif isinstance(part, Fp8Experts):
            for name in (part.treegen_up, part.treegen_down):
                scales[id(getattr(part, name))] = getattr(part, f"{name}_scale")
    hidden = {id(scale) for scale in scales.values()}
    state = module.state_dict(keep_vars=True)
    targets = {name: weight for name, weight in state.items() if id(weight) not in hidden}
    required: dict[str, Tensor] = {
        name: weight for name, weight in targets.items() if isinstance(weight, nn.Parameter)
    }
    return targets, required, scales


def _loaded_names(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], model: Model
) -> list[str]:
    """Return the names of tensors, except those of parts that the model was loaded without."""
    return [
        name
        for name in tensors
        if name in targets or not name.startswith(_unloaded_prefixes(model))
    ]


def _unloaded_prefixes(model: Model) -> tuple[str, ...]:
    return tuple(f"{part}." for part in model.spec.unreached)


def _collect(weights: Any, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return named tensors as a dict; what a generator yields stays in memory."""
    if isinstance(weights, Mapping):
        if unnamed := [name for name in weights if not isinstance(name, str)]:
            raise InputError(f"tensor names must be strings, got {unnamed[0]!r:.60}")
        return dict(weights)
    tensors: dict[str, Tensor] = {}
    name_of: dict[int, str] = {}
    if not isinstance(weights, Iterable):
        raise InputError(
            "update requires a checkpoint directory, a module or named tensors, got "
            f"{type(weights).__name__}"
        )
    for pair in weights:
        match pair:
            case (str(name), Tensor() as tensor):
                pass
            case _:
                raise InputError(f"update expects pairs of a name and a tensor, got {pair!r:.60}")
        if name in tensors:
            raise InputError(f"two tensors are named {name}; pass one tensor for each name")
        other = name_of.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if other != name and targets.get(name) is not targets.get(other, tensor):
            raise InputError(
                f"{other} and {name} use the same memory, so one tensor has overwritten the "
                "other; yield clones"
            )
        tensors[name] = tensor
    return tensors


def _check_names(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], required: Mapping[str, Tensor]
) -> None:
    if unknown := [name for name in tensors if name not in targets]:
        raise InputError(
            f"the model has no weights with these names: {format_names(unknown)}; remove these "
            "tensors"
        )
    covered = {id(targets[name]) for name in tensors}
    if missing := [name for name, weight in required.items() if id(weight) not in covered]:
        raise InputError(
            f"the new weights have no {format_names(missing)}; pass all weights of the model"
        )


def _check_tensor(name: str, tensor: Any, target: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "full_tensor"):
        raise InputError(f"{name} is sharded over processes; pass {name}.full_tensor()")
    if tensor.shape != target.shape:
        raise InputError(
            f"{name} must have shape {list(target.shape)}, got {list(tensor.shape)}; pass "
            "weights of the same model"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        raise InputError(
            f"{name} must be a dense tensor with data, got layout {tensor.layout} on "
            f"{tensor.device}"
        )
    is_wide = tensor.is_floating_point() and tensor.itemsize > 1
    if target.is_floating_point() and not is_wide:
        raise InputError(
            f"{name} must have a floating-point dtype of at least 16 bits, got {tensor.dtype}"
        )


def _check_finite(name: str, tensor: Tensor, target: Tensor, model: Model) -> None:
    """Raise InputError if a new tensor has NaN or infinities, and the model's has none."""
    if not target.is_floating_point():
        return
    dtype = target.dtype if target.itemsize > 1 else model.dtype  # FP8 gets new scales
    if _is_finite(tensor, dtype):
        return
    old = model.module.state_dict().get(name) if target.is_meta else target
    if old is None or _is_finite(old if old.itemsize > 1 else old.to(dtype), dtype):
        raise InputError(
            f"{name} has values that are not finite in {dtype}; the old weights are kept"
        )


def _is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all numbers are finite in a type, without a copy of the tensor."""
    if not tensor.numel():
        return True
    return all(bool(extreme.to(dtype).isfinite()) for extreme in tensor.detach().aminmax())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other.to(one.device, one.dtype))


def _tensors_of(part: Any, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a plain module, with adapters of PEFT merged into copies of them."""
    state: dict[str, Tensor] = part.state_dict(keep_vars=True)
    if any(_BASE in name for name in targets) or not any(_BASE in name for name in state):
        return {name: tensor.detach() for name, tensor in state.items()}
    for path, layer in part.named_modules():
        if hasattr(layer, "get_delta_weight"):
            inside = [name for name in state if name.startswith(f"{path}.")]
            layer_state = {name: state.pop(name) for name in inside}
            for name, tensor in layer_state.items():
                if name.startswith(f"{path}{_BASE}."):
                    state[name.replace(_BASE, "", 1)] = tensor
            state[f"{path}.weight"] = _merge_lora(path, layer)
    for name in state:
        if _BASE in name or _SAVED in name:
            raise _not_plain_error(name.split(_BASE)[0].split(_SAVED)[0])
    return {name: tensor.detach() for name, tensor in state.items()}


@torch.no_grad()
def _merge_lora(path: str, layer: Any) -> Tensor:
    """Return the weight of a layer with the LoRA adapters that are active."""
    is_plain = hasattr(layer, "lora_A") and getattr(layer, "parameter_name", "weight") == "weight"
    weight: Tensor | None = getattr(layer.get_base_layer(), "weight", None)
    if weight is None:
        raise _not_plain_error(path)
    if layer.merged or layer.disable_adapters:
        return weight
    for name in layer.active_adapters:
        if is_plain and name not in layer.scaling:
            continue
        if not is_plain or layer.use_dora.get(name) or layer.lora_bias.get(name):
            raise _not_plain_error(path)
        weight = weight.float() + layer.get_delta_weight(name).float()
    return weight


def _not_plain_error(path: str) -> InputError:
    return InputError(
        f"the adapter of {path} is not plain LoRA; pass copy.deepcopy(module).merge_and_unload()"
    )


def _read_checkpoint(
    model: Model, path: str | os.PathLike[str], ranks: Ranks | None
) -> tuple[dict[str, Tensor], str]:
    """Return the weights of a checkpoint as the model's own were loaded, and their fingerprint.

    Args:
        model: The model.
        path: The checkpoint.
        ranks: The ranks, if this process reads only its shard; None to read all weights.
    """
    directory = locate(path, None, weights=True)
    config = read_config(path, directory, revision=None, trust_remote_code=False)
    check_settings(model, config, "config.json")
    check_weights(directory)
    plan = LoadPlan(
        directory=directory,
        config=config,
        spec=model.spec,
        dtype=model.dtype,
        device=torch.device("cpu"),
        stored=quantization_of(config),
        quantization="none",
        adapter=None,
        images=model.tower is not None,
        ranks=ranks,
        trust_remote_code=False,
    )
    return load_weights(plan).state_dict(), fingerprint(directory)


def _plain_config(model: Model) -> Any:
    """Return a copy of a model's configuration, without quantization."""
    config = copy.deepcopy(model.module.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _convert_checkpoint_tensors(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes of the model's, from those of its checkpoints."""
    stock: Any = type(model.module)
    config = _plain_config(model)
    with quiet_loading():
        try:
            loaded, info = stock.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=model.dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise InputError(
                f"the new weights do not fit the model: {summarize_error(error)}; pass the "
                "weights of the module or of a checkpoint of the same model"
            ) from None
    for kind in ("mismatched", "unexpected", "missing"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names := [name for name in names if not name.startswith(_unloaded_prefixes(model))]:
            raise InputError(
                f"the new weights do not fit the model: {kind} {format_names(names)}; pass the "
                "weights of the module or of a checkpoint of the same model"
            )
    return cast(dict[str, Tensor], loaded.state_dict())


_NEUTRAL: Final = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("use_cache", "initializer_range", "tie_word_embeddings", "router_aux_loss_coef"),
)
"""Settings that do not decide what its layers compute from the weights."""


def check_settings(model: Model, config: Any, name: str) -> None:
    """Check that new weights have the settings of a model, because an update changes only weights.

    Args:
        model: The model.
        config: The configuration of the checkpoint or module that has the new weights.
        name: Its name in messages.

    Raises:
        InputError: a setting that decides what layers compute differs.
    """
    own, new = (
        _settings_of(whole.get_text_config(decoder=True).to_dict())
        for whole in (model.module.config, config)
    )
    for key in ("model_type", *sorted(own)):  # other tools add further keys
        if not _is_same(own.get(key), new.get(key)):
            raise InputError(
                f"{name} has {key} {new.get(key)!r:.60}, but the model has "
                f"{own.get(key)!r:.60}; pass weights of the same model, or pass only named "
                "tensors to keep the model's settings"
            )


def _settings_of(values: Any) -> Any:
    """Return the settings, at any depth, that decide what layers compute from their weights."""
    if not isinstance(values, dict):
        return values
    return {
        name: _settings_of(value)
        for name, value in values.items()
        if name not in _NEUTRAL
        and not str(name).startswith(("_", "output_"))
        and not str(name).endswith("_token_id")
        and "drop" not in str(name)
    }


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal. GGUF files store numbers in float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_is_same(one.get(name), other.get(name)) for name in {*one, *other})
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
