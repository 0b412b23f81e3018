"""Refuse modules whose gradients over a packed tree would be wrong."""

from __future__ import annotations

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
from treegen.model.checkpoint.quantized import quantisation_of
from treegen.model.chunked import is_scaling_layer
from treegen.model.load import from_module, patch_module

_REPEAT: Final = "compute the loss from a batch of repeated prompts instead"
_RANDOM: Final = ("drop", "jitter")
"""Parts of the names of attributes that make the forward pass random if they are above 0."""
_DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_specs: WeakKeyDictionary[nn.Module, ModelSpec] = WeakKeyDictionary()


def unwrap(module: Any) -> PreTrainedModel:
    """Return the transformers module inside of DDP and of PEFT adapters.

    Raises:
        InputError: there is none, or an adapter learns prompts.
    """
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if hasattr(module, "get_base_model"):
        if any(config.is_prompt_learning for config in module.peft_config.values()):
            raise InputError(
                "adapters that learn prompts are not supported; LoRA and the like are; use one of "
                "those"
            )
        module = module.get_base_model()
    if not isinstance(module, PreTrainedModel):
        raise InputError(
            "the tree loss takes a model of transformers, or one inside of DDP or a PEFT adapter, "
            f"got {type(module).__name__}; weights sharded by FSDP or DeepSpeed are not supported"
        )
    return module


def check_trainable(module: PreTrainedModel) -> ModelSpec:
    """Return the shape of a module whose gradients over a tree equal those of single texts.

    Everything but dropout is checked once for each module.

    Raises:
        ModelError: the gradients would differ.
        InputError: the module is no language model, or has a dtype that treegen does not support.
    """
    if module not in _specs:
        _specs[module] = _check_module(module)
    if module.training:
        _check_dropout(module)
    return _specs[module]


def _check_module(module: PreTrainedModel) -> ModelSpec:
    config, name = module.config, module.config.model_type
    is_float = all(weight.dtype.is_floating_point for weight in module.parameters())
    is_small = any(weight.dtype.itemsize < 2 for weight in module.parameters())
    if quantisation_of(config) is not None or not is_float or is_small:
        raise ModelError(
            f"this {name} model has quantised weights, which the tree loss does not support; "
            f"load it in bfloat16 or float32, or {_REPEAT}"
        )
    refuse_family(config)
    if types := recurrent_types(config):
        raise ModelError(
            f"{name} models cannot be trained on trees: they have recurrent layers "
            f"({', '.join(types)}); {_REPEAT}"
        )
    if dense_length(config.get_text_config(decoder=True)) is not None:
        raise ModelError(
            f"{name} models cannot be trained on trees: their layers select keys; {_REPEAT}"
        )
    if any(map(is_scaling_layer, module.modules())):
        raise ModelError(
            f"{name} models cannot be trained on trees: their layers scale queries by their place "
            f"in a pass; {_REPEAT}"
        )
    # The check compares logits with stock attention. Tested families do not need it.
    with patch_module(module):
        spec = from_module(module, check=not is_tested(name)).spec
    if spec.states:
        raise ModelError(
            f"{name} models cannot be trained on trees: they have recurrent layers; {_REPEAT}"
        )
    return spec


def _check_dropout(module: nn.Module) -> None:
    """Raise ModelError if a part of the module would drop or change activations at random."""
    for part in module.modules():
        if not part.training:
            continue
        values = vars(part).items()
        noisy = [
            key
            for key, value in values
            if isinstance(value, float) and value > 0 and any(word in key for word in _RANDOM)
        ]
        if isinstance(part, _DROPOUT) and part.p > 0:
            noisy.append("p")
        if noisy:
            path = next(path for path, other in module.named_modules() if other is part)
            raise ModelError(
                f"{path or 'the model'} ({type(part).__name__}) has {noisy[0]} "
                f"{getattr(part, noisy[0])}: all samples below a shared token would get the same "
                "random numbers; set it to 0, or call eval() on the module"
            )
