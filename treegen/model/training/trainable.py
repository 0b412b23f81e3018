"""Refuse modules whose gradients over a packed tree would be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from treegen.common.spec import ModelSpec
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.families import (
    dense_length,
    is_tested,
    recurrent_types,
    refuse_family,
)
from treegen.model.checkpoint.quantization import quantization_of
from treegen.model.chunked import is_scaling_layer
from treegen.model.load import from_module, patch_module

_REPEAT: Final = "compute the loss from a batch of repeated prompts instead"
_RANDOM: Final = ("drop", "jitter", "noise")
"""Parts of the names of attributes that make the forward pass random if they are above 0."""
_specs: WeakKeyDictionary[nn.Module, tuple[int, ModelSpec]] = WeakKeyDictionary()


def strip_wrappers(module: Any) -> Any:
    """Return the module inside of DDP and `torch.compile`, in any order; PEFT adapters stay."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):
        is_ddp = isinstance(module, DistributedDataParallel)
        module = module.module if is_ddp else module.get_submodule("_orig_mod")
    return module


def strip_adapters(module: Any) -> Any:
    """Return the module inside of DDP, `torch.compile` and PEFT; adapters stay in its layers.

    Raises:
        InputError: an adapter learns prompts.
    """
    module = strip_wrappers(module)
    if not hasattr(module, "get_base_model"):
        return module
    if any(config.is_prompt_learning for config in module.peft_config.values()):
        raise InputError(
            "prompt learning adapters are not supported; use LoRA or a similar adapter"
        )
    return module.get_base_model()


def unwrap(module: Any) -> PreTrainedModel:
    """Return the transformers module inside of DDP, `torch.compile` and PEFT adapters.

    Raises:
        InputError: there is none, or an adapter is not supported.
    """
    base, adapted = strip_adapters(module), strip_wrappers(module)
    adapters = () if base is adapted else adapted.peft_config.values()
    if any(config.peft_type == "PVERA" for config in adapters) and adapted.training:
        raise InputError(
            "PVeRA adapters are not supported in training, because PVeRA draws random numbers for "
            "each token and samples share tokens; use another adapter"
        )
    if not isinstance(base, PreTrainedModel):
        raise InputError(
            "the tree loss requires a transformers model, with or without DDP or a PEFT "
            f"adapter, got {type(base).__name__}; weights sharded by FSDP1 or DeepSpeed are "
            "not supported"
        )
    return base


def check_trainable(module: PreTrainedModel) -> ModelSpec:
    """Return the shape of a module whose gradients over a tree equal those of single texts.

    Everything but dropout is checked once for each module, and again after its vocabulary changed.

    Raises:
        ModelError: the gradients would differ.
        InputError: the module is no language model, or has a dtype that treegen does not support.
    """
    size, spec = _specs.get(module, (0, None))
    if spec is None or size != module.config.get_text_config(decoder=True).vocab_size:
        spec = _check_module(module)
        _specs[module] = module.config.get_text_config(decoder=True).vocab_size, spec
    if module.training:
        _check_dropout(module)
    return spec


def _check_module(module: PreTrainedModel) -> ModelSpec:
    config, name = module.config, module.config.model_type
    is_float = all(weight.dtype.is_floating_point for weight in module.parameters())
    is_small = any(weight.dtype.itemsize < 2 for weight in module.parameters())
    if quantization_of(config) is not None or not is_float or is_small:
        raise ModelError(
            f"this {name} model has quantized weights, which the tree loss does not support; "
            f"load it in bfloat16 or float32, or {_REPEAT}"
        )
    if len(devices := {str(weight.device) for weight in module.parameters()}) > 1:
        raise ModelError(
            "the tree loss requires all weights on one device, got "
            f"{', '.join(sorted(devices))} for this {name} model; load the model without "
            "device_map"
        )
    refuse_family(config)
    if types := recurrent_types(config):
        raise _refusal(name, f"they have recurrent layers ({', '.join(types)})")
    if dense_length(config.get_text_config(decoder=True)) is not None:
        raise _refusal(name, "their layers select keys")
    if any(map(is_scaling_layer, module.modules())):
        raise _refusal(name, "their layers scale queries by the position in a pass")
    # The check compares logits with stock attention. Tested families do not need it.
    with patch_module(module):
        spec = from_module(module, check=not is_tested(name)).spec
    if spec.states:
        raise _refusal(name, "they have recurrent layers")
    return spec


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(f"{name} models cannot be trained on trees: {reason}; {_REPEAT}")


def _check_dropout(module: nn.Module) -> None:
    """Raise ModelError if a part of the module would drop or change activations at random."""
    for part in module.modules():
        for name, value in _random_settings(part) if part.training else ():
            path = next(path for path, other in module.named_modules() if other is part)
            raise ModelError(
                f"{path or 'the model'} ({type(part).__name__}) has {name} {value}, which gives "
                f"all samples below a shared token the same random numbers; set {name} to 0, or "
                "call eval() on the module"
            )


def _random_settings(part: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a part's settings that make its outputs random."""
    for name, setting in vars(part).items():
        # Layers of an adapter have one setting for each adapter.
        for value in setting.values() if isinstance(setting, dict) else (setting,):
            is_rate = name == "p" and "Dropout" in type(part).__name__
            is_rate |= any(word in name for word in _RANDOM)
            if is_rate and type(value) in (int, float) and value > 0:
                yield name, value
