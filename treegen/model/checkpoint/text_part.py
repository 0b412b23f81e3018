"""The text part of a multimodal model: which class runs it, and which parts text needs.

transformers' own class for the whole model runs it, so text is processed as that class defines
(positions, scales). The parts that text never reaches are left out.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Final

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

_MAPPINGS: Final = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
)


def generates_text(config: PretrainedConfig) -> bool:
    """Return whether transformers has its own class that generates text from the configuration."""
    return any(type(config) in mapping for mapping, _ in _MAPPINGS)


def auto_class(config: PretrainedConfig, *, images: bool = False) -> Any:
    """Return transformers' auto class that builds a text-generating model from a configuration.

    Args:
        config: The model's configuration.
        images: Whether the model must take images too. Some families have a separate class for
            text.
    """
    for mapping, auto in reversed(_MAPPINGS) if images else _MAPPINGS:
        if type(config) in mapping:
            return auto
    return AutoModelForCausalLM  # the class is in the checkpoint's own code


def attention_of_text(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return the attn_implementation that selects the attention function `name` for the text part.

    Other parts may only support their own attention functions and would refuse this one.
    """
    text = config.get_text_config(decoder=True)
    for key in config.sub_configs:
        if getattr(config, key, None) is text:
            return {"": name, key: name}
    return {"": name} if "vision_config" in config.sub_configs else name


def find_unused_parts(
    module: nn.Module, attentions: Sequence[nn.Module], called: Iterable[nn.Module]
) -> tuple[str, ...]:
    """Return the names of the parts that a pass over text did not call: image and sound towers.

    Such a part is a child of a module between the model and its list of layers, and the pass called
    nothing in it. Modules inside the layers never count.

    Args:
        module: The model.
        attentions: The attention module of each layer.
        called: The modules that the pass called.
    """
    names = {part: name for name, part in module.named_modules()}
    if not attentions:
        return ()
    reached = set(called)
    paths = zip(*(names[part].split(".") for part in attentions), strict=False)
    # Collect the names on the path from the model to its list of layers.
    stack = [p[0] for p in takewhile(lambda p: len({*p}) == 1 and not p[0].isdigit(), paths)]
    unused: list[str] = []
    for depth, step in enumerate(stack):
        above = ".".join(stack[:depth])
        for name, part in module.get_submodule(above).named_children():
            if name != step and list(part.parameters()) and not reached & set(part.modules()):
                unused.append(f"{above}.{name}".lstrip("."))
    return tuple(unused)


def drop_parts(module: nn.Module, names: Iterable[str]) -> None:
    """Remove the named parts from a module, and with them their weights."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, None)
