"""The text part of a model that takes images or sound too: what runs it, and what it needs.

Such a model is run by transformers' own class for the whole of it. So a text gets what the class
does to texts (positions, scales). The parts that a text never reaches are left out.
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
    """Whether transformers has a class of its own that generates text from the configuration."""
    return any(type(config) in mapping for mapping, _ in _MAPPINGS)


def auto_class(config: PretrainedConfig, *, images: bool = False) -> Any:
    """The auto class of transformers that makes a text-generating model from a configuration.

    Args:
        images: Whether it must take images too; some families have a class for texts alone beside.
    """
    for mapping, auto in reversed(_MAPPINGS) if images else _MAPPINGS:
        if type(config) in mapping:
            return auto
    return AutoModelForCausalLM  # the class is in code that comes with the checkpoint


def attention_of_text(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """What to set as attn_implementation so that the text part attends by the function named.

    Other parts may know only attention functions of their own, and would refuse this one.
    """
    text = config.get_text_config(decoder=True)
    for key in config.sub_configs:
        if getattr(config, key, None) is text:
            return {"": name, key: name}
    return name


def find_unused_parts(
    module: nn.Module, attentions: Sequence[nn.Module], called: Iterable[nn.Module]
) -> tuple[str, ...]:
    """Names of the parts that a pass over text did not call: image and sound towers.

    Such a part hangs on the way from the model down to its list of layers, and the pass called
    nothing in it. What lies within the layers never counts.

    Args:
        attentions: The module that attends, for each layer.
        called: The modules that the pass called.
    """
    names = {part: name for name, part in module.named_modules()}
    if not attentions:
        return ()
    reached = set(called)
    paths = zip(*(names[part].split(".") for part in attentions), strict=False)
    # The names on the way from the model to its list of layers.
    stack = [p[0] for p in takewhile(lambda p: len({*p}) == 1 and not p[0].isdigit(), paths)]
    found: list[str] = []
    for depth, step in enumerate(stack):
        above = ".".join(stack[:depth])
        for name, part in module.get_submodule(above).named_children():
            if name != step and list(part.parameters()) and not reached & set(part.modules()):
                found.append(f"{above}.{name}".lstrip("."))
    return tuple(found)


def drop_parts(module: nn.Module, names: Iterable[str]) -> None:
    """Take the parts named out of a module, and with them their weights."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, None)
