"""Let a transformers module attend by levels of a packed tree while it is trained.

The module is the one that is trained. Only the name of its attention function changes, during the
forward pass and wherever gradient checkpointing runs layers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from treegen.errors import ModelError
from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.hook import make_keyword_error, read_call
from treegen.model.load import configs_of, restoring_attention_names
from treegen.ops.attention.tree import TreeLayout, attend_tree
from treegen.ops.attention.types import AttentionOptions, Window

# T tokens, H query heads, K key dimension, V value dimension

TREE: Final = "treegen_tree"
_CHECKPOINTING: Final = "_gradient_checkpointing_func"


def _attention(
    module: nn.Module, *tensors: Any, treegen: TreeLayout | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend to the paths of a tree; return the output [1, T, H, V] and None for the weights.

    The other arguments are those of `read_call`.
    """
    if treegen is None:
        raise make_keyword_error(module)
    if rate := options.get("dropout"):
        raise ModelError(
            f"{type(module).__name__} calls attention with dropout {rate}, which gives all "
            "samples below a shared token the same random numbers; set dropout to 0, or call "
            "eval() on the module"
        )
    call = read_call(module, *tensors, **options)
    device_type = call.q_THK.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else call.v_TGV.dtype
    q_HTK, k_GTK, v_GTV = (
        x.transpose(0, 1).to(dtype) for x in (call.q_THK, call.k_TGK, call.v_TGV)
    )
    scale = q_HTK.shape[-1] ** -0.5 if call.scale is None else call.scale
    window = None if call.window is None else Window(call.window)
    if call.chunk is not None:
        window = Window(call.chunk, is_chunk=True)
    options_of_layer = AttentionOptions(scale, window, call.softcap, call.sinks_H)
    out_HTV = attend_tree(q_HTK, k_GTK, v_GTV, treegen, options_of_layer)
    return out_HTV.transpose(0, 1)[None].contiguous(), None


# A compiled module would compile the blocks of each new tree.
AttentionInterface.register(TREE, torch.compiler.disable(_attention))


@contextmanager
def use_tree_attention(module: PreTrainedModel) -> Iterator[None]:
    """While open, let a module attend by levels; also in later recomputations of its layers.

    Args:
        module: The module. Its forward pass gets a `TreeLayout` as `treegen`.
    """
    configs = configs_of(module)
    with restoring_attention_names(configs):
        module.set_attn_implementation(attention_of_text(module.config, TREE))
        names = [(config, config._attn_implementation_internal) for config in configs]

    @contextmanager
    def switch() -> Iterator[None]:
        with restoring_attention_names(configs):
            for config, name in names:
                config._attn_implementation_internal = name
            yield

    parts = [part for part in module.modules() if _CHECKPOINTING in vars(part)]
    before = [getattr(part, _CHECKPOINTING) for part in parts]
    try:
        for part, checkpoint in zip(parts, before, strict=True):
            setattr(part, _CHECKPOINTING, _switching(checkpoint, switch))
        with switch():
            yield
    finally:
        for part, checkpoint in zip(parts, before, strict=True):
            setattr(part, _CHECKPOINTING, checkpoint)


def _switching(checkpoint: Callable[..., Any], switch: Callable[[], Any]) -> Callable[..., Any]:
    """Return a checkpoint function that computes by levels whenever it runs a layer."""

    def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call(*inputs: Any, **options: Any) -> Any:
            with switch():
                return layer(*inputs, **options)

        return checkpoint(call, *args, **kwargs)

    return run
