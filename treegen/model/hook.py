"""The attention function that transformers calls in every layer of a model.

A layer of transformers computes queries, keys and values and applies RoPE. Then it calls the
function that is registered under the model's attn_implementation. This one writes the keys and
values into the page pool and attends to the levels of the batch. The batch travels down through the
model as the keyword `treegen`. No mask function is registered under the name, so transformers
builds no mask: the levels say what is causal, and each call has its window.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treegen.common.spec import LatentSpec
from treegen.errors import ModelError
from treegen.model.batch import Batch
from treegen.model.latent import OURS, get_up_projection, is_latent_layer, latent_of
from treegen.ops.attention import attend
from treegen.ops.attention.api import AttendOptions
from treegen.ops.attention.latent import attend_latents
from treegen.ops.cache.kv_writes import write_kv

# T tokens, H query heads, G key heads, K key dimension, V value dimension

ATTENTION, PROBE = OURS
NO_NUMBER: Final = -1
"""For the number of a layer whose module has none, as one that several layers share."""
KEYS: Final = "treegen_keys"
VALUES: Final = "treegen_values"
"""Names of the buffers that stand for the page pool of a compiled attention module."""

_OTHER: Final = "its numbers would be wrong; use another model"

# Some families pass these keywords to the function. They change nothing in what it computes.
_HARMLESS: Final = frozenset({"position_ids", "cache_position", "logits_to_keep"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of the attention function.

    layer: the number of the layer.
    q_THK, k_TGK, v_TGV: its queries, keys and values; of a layer that keeps latents, these and
    what is rotated.
    scale: what logits are multiplied by; None for K ** -0.5.
    window: keys that a row sees at most, its own included; None for all.
    softcap: the bound of logits; None for none.
    sinks_H: one more logit in the denominator of each head; None for none.
    latent: how keys and values are made of latents; None if they are kept as they are.
    """

    layer: int
    q_THK: Tensor
    k_TGK: Tensor
    v_TGV: Tensor
    scale: float | None
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None
    latent: LatentSpec | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The calls of a forward pass with the probing function. Each list has one item for each call.

    calls: what the layer asked for.
    given: the tensors of keys and values that it passed.
    sources: the call that first passed these very tensors.
    modules: the attention module that called.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def add(self, module: nn.Module, call: AttentionCall, key: Tensor, value: Tensor) -> None:
        """Record a call, and which layer's keys and values it has."""
        self.modules.append(module)
        same = [at for at, (k, v) in enumerate(self.given) if k is key and v is value]
        self.sources.append(same[0] if same else len(self.calls))
        self.calls.append(call)
        self.given.append((key, value))


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
    """Check the call of a layer, whose tensors are [1, heads, T, dim], and return it.

    A keyword that is not known may change the result, so it is not dropped. None and False are
    taken for options that are off.

    Raises:
        ModelError: the layer asks for what levels cannot do, or passes an unknown keyword.
    """
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        layer = NO_NUMBER
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} of layer {layer} is not causal; {_OTHER}")
    if attention_mask is not None:
        raise ModelError(f"{name} of layer {layer} builds its own attention mask; {_OTHER}")
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
            f"not supported; {_OTHER}"
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
        latent=latent_of(module) if is_latent_layer(module) else None,
    )


def write_and_attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Store the new keys and values in a layer's pool, then attend to all levels of a batch.

    They are stored first, so a token finds its own key in its own level.

    Returns out [T, H, V].

    Args:
        keys: The pool, [pages, page_size, G, K] and [pages, page_size, G, V].
        values: The pool, [pages, page_size, G, K] and [pages, page_size, G, V].
    """
    write_kv(keys, values, batch.slots_T, k_TGK, v_TGV)
    return attend(q_THK, keys, values, batch.levels_of(options.get("window")), **options)


def write_and_attend_latents(
    q_THK: Tensor,
    latent_TGR: Tensor,
    rotated_TGP: Tensor,
    keys: Tensor,
    up_HXR: Tensor,
    batch: Batch,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """`write_and_attend` for a layer that keeps latents.

    Args:
        latent_TGR: Of each token; G is 1.
        rotated_TGP: Of each token; G is 1.
        keys: The pool, [pages, page_size, 1, R + P].
        up_HXR: What makes keys and values of latents.
    """
    rank, rope = latent_TGR.shape[-1], rotated_TGP.shape[-1]
    write_kv(keys[..., :rank], keys[..., rank:], batch.slots_T, latent_TGR, rotated_TGP)
    heads, nope = q_THK.shape[1], q_THK.shape[2] - rope
    form = LatentSpec(heads, rank, rope, nope, up_HXR.shape[1] - nope)
    if options["scale"] is None:
        options["scale"] = form.k_dim**-0.5
    levels = batch.levels_of(options.get("window"))
    return attend_latents(q_THK, keys, up_HXR, form, levels, **options)


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
    """Attend as the batch says. Returns out [1, T, H, V], and None for the attention weights."""
    if treegen is None:
        return _compiled_attention(module, query, key, value, **options), None
    call = read_call(module, query, key, value, attention_mask, **options)
    pool = treegen.layers[call.layer]
    new = call.q_THK, call.k_TGK, call.v_TGV
    asked: AttendOptions = {
        "scale": call.scale,
        "window": call.window,
        "softcap": call.softcap,
        "sinks": call.sinks_H,
    }
    if call.latent is not None:
        out_THV = write_and_attend_latents(
            *new, pool.keys, get_up_projection(module), treegen, **asked
        )
    else:
        out_THV = write_and_attend(*new, pool.keys, pool.values, treegen, **asked)
    return out_THV[None], None


def _compiled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attend in a compiled layer. Its options were checked before it was compiled."""
    keys = getattr(module, KEYS, None)
    if keys is None:
        raise _make_keyword_error(module)
    is_latent = is_latent_layer(module)
    operators = torch.ops.treegen
    out_THV: Tensor = (
        operators.write_and_attend_latents if is_latent else operators.write_and_attend
    )(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        get_up_projection(module) if is_latent else getattr(module, VALUES),
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
    """Record the call in the probe that travels as `treegen`. Returns an out without values."""
    if treegen is None:
        raise _make_keyword_error(module)
    call = read_call(module, query, key, value, attention_mask, **options)
    treegen.add(module, call, key, value)
    _, num_heads, num_tokens, _ = query.shape
    width = value.shape[-1] if call.latent is None else call.latent.v_dim
    return query.new_empty(1, num_tokens, num_heads, width), None


def _make_keyword_error(module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} drops keyword arguments on their way to attention; "
        "the model cannot be used; take another model (docs/limitations.md)"
    )


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _probe)
