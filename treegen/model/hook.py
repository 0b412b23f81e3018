"""The attention function that transformers calls in every layer of a model.

transformers' layers compute queries, keys and values, apply RoPE, and call the function registered
under the model's attn_implementation. Ours writes the keys and values into the page pool and
attends to the levels of the batch, which travels down as the keyword `treegen`. No mask function is
registered for the name, so transformers builds no mask: causality and windows are the levels'.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treegen.attention import Prepared, attend
from treegen.cache.writes import write
from treegen.errors import ModelError
from treegen.model.batch import Batch

# T tokens, H query heads, G key-value heads, K key dim, V value dim

ATTENTION: Final = "treegen"
PROBE: Final = "treegen_probe"
KEYS: Final = "treegen_keys"
VALUES: Final = "treegen_values"
"""Buffers of attention modules with their page pools, where the layers are compiled."""

# Reach the function in some families and change nothing that it computes.
_HARMLESS: Final = frozenset({"position_ids", "cache_position", "logits_to_keep"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asked of the attention function: its tensors and its kind of softmax."""

    layer: int
    q_THK: Tensor
    k_TGK: Tensor
    v_TGV: Tensor
    scale: float | None
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What a forward pass with the probing function appends to, one item a call.

    sources: the layer that was first given the very tensors of the call as keys and values.
    modules: what made the call.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def add(self, module: nn.Module, call: AttentionCall, key: Tensor, value: Tensor) -> None:
        """Record a call and where its keys and values come from."""
        self.modules.append(module)
        same = [
            c.layer
            for c, (k, v) in zip(self.calls, self.given, strict=True)
            if k is key and v is value
        ]
        self.calls.append(call)
        self.given.append((key, value))
        self.sources.append(same[0] if same else call.layer)


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> AttentionCall:
    """Check a layer's call, [1, heads, T, dim] tensors, and return it; what is unknown raises.

    A keyword that we do not know may change the result, so it must not be dropped; None and False
    are flags that are off.
    """
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{name} has no layer number (layer_idx); the model cannot be used")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} of layer {layer} is not causal; only causal models can be used")
    if attention_mask is not None:
        raise ModelError(f"{name} of layer {layer} builds its own attention mask; not supported")
    if dropout:
        raise ModelError(f"{name} of layer {layer} asks for dropout {dropout}; call eval() first")
    unknown = {
        keyword: value
        for keyword, value in others.items()
        if keyword not in _HARMLESS and value is not None and value is not False
    }
    if unknown:
        raise ModelError(
            f"{name} of layer {layer} passes {', '.join(sorted(unknown))} to attention, which is "
            "not supported; the model would give wrong numbers"
        )
    return AttentionCall(
        layer=layer,
        q_THK=query[0].transpose(0, 1),
        k_TGK=key[0].transpose(0, 1),
        v_TGV=value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window or None,
        softcap=softcap or None,
        sinks_H=s_aux,
    )


def write_and_attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    slots_T: Tensor,
    levels: Prepared,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new keys and values in a layer's pool, then attend to all levels: out [T, H, V].

    Writing comes first, so that a token finds itself among the keys of its own level.
    """
    write(keys, values, slots_T, k_TGK, v_TGV)
    return attend(
        q_THK, keys, values, levels, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    treegen: Batch | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as the batch says: out [1, T, H, V], and no attention weights."""
    if treegen is None:
        return _compiled_attention(module, query, key, value, **options), None
    call = read_call(module, query, key, value, attention_mask, **options)
    pool = treegen.layers[call.layer]
    out_THV = write_and_attend(
        call.q_THK,
        call.k_TGK,
        call.v_TGV,
        pool.keys,
        pool.values,
        treegen.slots_T,
        treegen.levels,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks_H,
    )
    return out_THV[None], None


def _compiled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attend in a compiled layer, whose options were checked when it ran uncompiled."""
    keys = getattr(module, KEYS, None)
    if keys is None:
        raise _drops_keywords(module)
    out_THV: Tensor = torch.ops.treegen.write_and_attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        getattr(module, VALUES),
        options.get("s_aux"),
        options.get("scaling"),
        options.get("sliding_window") or None,
        options.get("softcap") or None,
    )
    return out_THV[None]


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    treegen: Probe | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record the call in the probe that travels as `treegen`: out [1, T, H, V], not filled."""
    if treegen is None:
        raise _drops_keywords(module)
    treegen.add(module, read_call(module, query, key, value, attention_mask, **options), key, value)
    _, num_heads, num_tokens, _ = query.shape
    return query.new_empty(1, num_tokens, num_heads, value.shape[-1]), None


def _drops_keywords(module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} drops keyword arguments on their way to attention; "
        "the model cannot be used"
    )


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _probe)
