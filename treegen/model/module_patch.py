"""Use treegen's attention in a module that the caller owns, and restore the module afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.hook import ATTENTION
from treegen.model.latent import disable_latents
from treegen.model.load import prepare

_PADDING: Final = "warn_if_padding_and_no_attention_mask"
_ABSENT: Final = object()


@contextmanager
def patch_module(module: PreTrainedModel) -> Iterator[None]:
    """While open, make a module ready for treegen: no gradients, no dropout, treegen's attention.

    Afterwards requires_grad, train and eval mode of each part, the attention functions, classes and
    attributes are restored. Wrappers of the module's own forward, such as accelerate's autocast,
    are removed while it is open.
    """
    training = [(part, part.training) for part in module.modules()]
    needs = [(weight, weight.requires_grad) for weight in module.parameters()]
    attends = [(config, config._attn_implementation_internal) for config in _configs(module)]
    attributes = [(part, _PADDING, vars(part).get(_PADDING, _ABSENT)) for part in module.modules()]
    attributes.append((module, "forward", vars(module).pop("forward", _ABSENT)))
    try:
        prepare(module)
        module.set_attn_implementation(attention_of_text(module.config, ATTENTION))
        yield
    finally:
        disable_latents(module)
        for config, name in attends:
            config._attn_implementation_internal = name
        for part, name, value in attributes:
            if value is not _ABSENT:
                setattr(part, name, value)
            elif name in vars(part):
                delattr(part, name)
        for weight, flag in needs:
            weight.requires_grad_(flag)
        for part, flag in training:
            part.training = flag


def _configs(module: nn.Module) -> list[Any]:
    """Return the configurations of a model's parts and their sub-configurations, each once."""
    configs: dict[int, Any] = {}
    waiting = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())
