"""The attention function that transformers calls in every layer of a model.

A transformers layer computes queries, keys and values, applies RoPE, and calls the function
registered under its attn_implementation. This function writes the keys and values into the page
pool and attends to the levels of the batch, which travels through the model as the keyword
`treegen`. No mask function is registered, so transformers builds no mask: the levels define
causality, and each call has its window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treegen.common.spec import LatentSpec
from treegen.errors import ModelError
from treegen.model.batch import Batch
from treegen.model.chunked import chunk_of, scale_queries, scaling_of
from treegen.model.indexer import index_dim_of, index_form_of, is_empty, is_selecting_layer
from treegen.model.latent import TREEGEN_ATTENTION, get_up_projection, is_latent_layer, latent_of
from treegen.ops.attention import attend
from treegen.ops.attention.api import AttendOptions
from treegen.ops.attention.key_selection import IndexForm, count_keys
from treegen.ops.attention.latent import attend_latents
from treegen.ops.attention.sparse_attention import (
    SelectedKeys,
    attend_selected,
    attend_selected_latents,
)
from treegen.ops.cache.pool import write_kv

# T tokens, H query heads, G key heads, K key dimension, V value dimension, R rank of latents,
# P rotated numbers of a key, X numbers of a head's key and value that are made from a latent, S
# selected keys

ATTENTION, PROBE = TREEGEN_ATTENTION
NO_NUMBER: Final = -1
"""The layer index of a module without one, such as a module that several layers share."""
KEYS: Final = "treegen_keys"
VALUES: Final = "treegen_values"
"""Names of the buffers that represent the page pool in a compiled attention module."""
CHUNK: Final = "treegen_chunk"
"""Attribute of a compiled attention module: its `chunk_of`, which depends on the layer index. Code
that reads the layer index is compiled anew for each layer."""

_OTHER: Final = "the results would be wrong; use another model"

# Some families pass these keywords to the function. They do not change its result.
_HARMLESS: Final = frozenset(
    {"position_ids", "cache_position", "logits_to_keep", "output_router_logits"}
)
_SELECTIONS: Final = frozenset({"indices", "block_indices"})
"""Keywords of sparse attention that hold the selected keys; None or an empty tensor means all keys.
Some layers pass the positions of selected keys in place of a mask."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The inputs and options of one call of the attention function."""

    layer: int
    """The index of the layer."""
    q_THK: Tensor
    """Its queries [T, H, K]."""
    k_TGK: Tensor
    """Its keys [T, G, K]; the latents in a layer with latent attention."""
    v_TGV: Tensor
    """Its values [T, G, V]; the rotated parts of keys in a layer with latent attention."""
    scale: float | None
    """The factor of logits; None for K ** -0.5."""
    window: int | None
    """Maximum keys that a row sees, including its own; None for all."""
    chunk: int | None
    """Number of positions of a chunk, if a row sees only the keys of its chunk; else None."""
    softcap: float | None
    """The soft bound of logits; None for none."""
    sinks_H: Tensor | None
    """A further logit in the softmax denominator of each head [H]; None for none."""
    latent: LatentSpec | None = None
    """How keys and values are made from latents; None for a layer without latent attention."""
    selected_TS: Tensor | None = None
    """The positions of the keys that each token selects [T, S]; None for all keys."""
    index_dim: int = 0
    """Number of elements of the layer's index keys; 0 without them."""
    index_form: IndexForm | None = None
    """Which keys the layer's indexer selects; None for all keys."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Records the attention calls of a forward pass. Each list has one item per call."""

    calls: list[AttentionCall] = field(default_factory=list)
    """The inputs and options of the call."""
    keys_and_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The tensors of keys and values that the layer passed."""
    sources: list[int] = field(default_factory=list)
    """The index of the call that first passed these very tensors."""
    modules: list[nn.Module] = field(default_factory=list)
    """The attention module that called."""

    def add(self, module: nn.Module, call: AttentionCall, key: Tensor, value: Tensor) -> None:
        """Record a call, and which earlier call passed the same keys and values.

        Args:
            module: The attention module that called.
            call: Its inputs and options.
            key: Its keys, as passed.
            value: Its values, as passed.
        """
        self.modules.append(module)
        same = [at for at, (k, v) in enumerate(self.keys_and_values) if k is key and v is value]
        self.sources.append(same[0] if same else len(self.calls))
        self.calls.append(call)
        self.keys_and_values.append((key, value))


def read_call(  # noqa: PLR0913 -- transformers passes these keywords
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> AttentionCall:
    """Check the attention call of a layer and return it.

    An unknown keyword may change the result, so it is an error and not ignored. None and False
    count as options that are off.

    Args:
        module: The attention module that calls.
        query: Queries [1, H, T, K].
        key: Keys [1, G, T, K]; latents in a layer with latent attention.
        value: Values [1, G, T, V]; rotated parts of keys in a layer with latent attention.
        attention_mask: Must be None or empty.
        dropout: Must be 0.
        scaling: The factor of logits; None for K ** -0.5.
        sliding_window: Maximum keys that a row sees, including its own; None or 0 for all.
        softcap: The soft bound of logits; None or 0 for none.
        s_aux: A further logit in the softmax denominator of each head [H]; None for none.
        is_causal: Must not be False.
        **kwargs: Further keywords. Known ones that do not change the result are accepted.

    Raises:
        ModelError: the layer needs something that levels cannot express, or passes an unknown
            keyword.
    """
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        layer = NO_NUMBER
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} of layer {layer} is not causal; {_OTHER}")
    selected = _find_selection(module, attention_mask, kwargs)
    if not is_empty(attention_mask) and selected is not attention_mask:
        raise ModelError(f"{name} of layer {layer} builds its own attention mask; {_OTHER}")
    if dropout:
        raise ModelError(
            f"{name} of layer {layer} uses dropout {dropout}; call eval() on the module first"
        )
    if unknown := _unknown_keywords(module, kwargs):
        raise ModelError(
            f"{name} of layer {layer} passes {', '.join(unknown)} to attention, which is "
            f"not supported; {_OTHER}"
        )
    call = AttentionCall(
        layer=layer,
        q_THK=query[0].transpose(0, 1),
        k_TGK=key[0].transpose(0, 1),
        v_TGV=value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window or None,
        chunk=chunk_of(module),
        softcap=softcap or None,
        sinks_H=s_aux,
        latent=latent_of(module) if is_latent_layer(module) else None,
        selected_TS=None if selected is None or is_empty(selected) else selected[0],
        index_dim=index_dim_of(module),
        index_form=index_form_of(module),
    )
    _check_selection(call, name, selects=is_selecting_layer(module) and selected is not None)
    return call


def _check_selection(call: AttentionCall, name: str, *, selects: bool) -> None:
    """Raise ModelError if a layer selects keys in a way that levels do not support.

    Args:
        call: The layer's call.
        name: Class of the layer.
        selects: Whether the layer has passed a selection, which may be empty.
    """
    if selects and (call.window or call.softcap):
        also = "window" if call.window else "soft cap"
        raise ModelError(
            f"{name} of layer {call.layer} both selects keys and has a {also}, which is not "
            f"supported; {_OTHER}"
        )
    form, heads, key_heads = call.index_form, call.q_THK.shape[1], call.k_TGK.shape[1]
    if form is not None and not form.fits(heads, key_heads):
        raise ModelError(
            f"{name} of layer {call.layer} selects keys for {form.selections} groups of heads, "
            f"which is not supported with {heads} query heads and {key_heads} key heads; {_OTHER}"
        )


def _unknown_keywords(module: nn.Module, kwargs: dict[str, Any]) -> list[str]:
    """Return the names of given keywords that could change the result in a way unknown here."""
    return sorted(
        keyword
        for keyword, value in kwargs.items()
        if keyword not in _HARMLESS
        and value is not None
        and value is not False
        and not (keyword in _SELECTIONS and is_empty(value))
        and not (keyword in _SELECTIONS and is_selecting_layer(module))
    )


def _find_selection(
    module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor | None:
    """Return the positions of selected keys that a layer passes; None if it passes none."""
    if not is_selecting_layer(module):
        return None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        return attention_mask
    return next((options[name] for name in _SELECTIONS if name in options), None)


def write_and_attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    selected_TS: Tensor | None = None,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Store the new keys and values in a layer's page pool, then attend to all levels of a batch.

    They are stored first, so that each token finds its own key in its own level.

    Args:
        q_THK: Queries [T, H, K].
        k_TGK: New keys [T, G, K].
        v_TGV: New values [T, G, V].
        keys: The layer's pool of keys [pages, page_size, G, K].
        values: The layer's pool of values [pages, page_size, G, V].
        batch: The batch: cache slots of the new tokens, and levels.
        selected_TS: The positions of the keys that each token selects [T, S], or [T, C, S] for C
            groups of heads. Default: all keys.
        **options: Scale, window, chunk, softcap and sinks, as in `treegen.ops.attention.attend`.

    Returns:
        The attention output [T, H, V].
    """
    write_kv(keys, values, batch.slots_T, k_TGK, v_TGV)
    if (selected := _get_selection(batch, selected_TS)) is not None:
        scale = options.get("scale") or q_THK.shape[-1] ** -0.5
        return attend_selected(q_THK, keys, values, selected, scale, options.get("sinks"))
    return attend(q_THK, keys, values, batch.levels_of(options.get("window")), **options)


def _get_selection(batch: Batch, selected_TS: Tensor | None) -> SelectedKeys | None:
    """Return the selected keys of a batch; None if every token sees all of its keys."""
    if selected_TS is None or count_keys(batch.levels) <= selected_TS.shape[-1]:
        return None
    return SelectedKeys(selected_TS, batch.slots_T, batch.levels)


def write_and_attend_latents(
    q_THK: Tensor,
    latent_TGR: Tensor,
    rotated_TGP: Tensor,
    keys: Tensor,
    up_HXR: Tensor,
    batch: Batch,
    selected_TS: Tensor | None = None,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Store new latents in a layer's page pool, then attend to all levels of a batch.

    This is `write_and_attend` for layers with latent attention.

    Args:
        q_THK: Queries [T, H, K].
        latent_TGR: The latent of each token [T, 1, R].
        rotated_TGP: The rotated part of each token's key [T, 1, P].
        keys: The layer's pool of latents and rotated parts [pages, page_size, 1, R + P].
        up_HXR: The weights that make keys and values from latents [H, X, R].
        batch: The batch: cache slots of the new tokens, and levels.
        selected_TS: The positions of the keys that each token selects [T, S]. Default: all keys.
        **options: Scale, window, chunk, softcap and sinks, as in `treegen.ops.attention.attend`.

    Returns:
        The attention output [T, H, V].
    """
    rank, rope = latent_TGR.shape[-1], rotated_TGP.shape[-1]
    write_kv(keys[..., :rank], keys[..., rank:], batch.slots_T, latent_TGR, rotated_TGP)
    heads, nope = q_THK.shape[1], q_THK.shape[2] - rope
    form = LatentSpec(heads, rank, rope, nope, up_HXR.shape[1] - nope)
    scale = form.k_dim**-0.5 if options["scale"] is None else options["scale"]
    if (selected := _get_selection(batch, selected_TS)) is not None:
        sinks = options.get("sinks")
        return attend_selected_latents(q_THK, keys, up_HXR, form, selected, scale, sinks)
    options["scale"] = scale
    levels = batch.levels_of(options.get("window"))
    return attend_latents(q_THK, keys, up_HXR, form, levels, **options)


def _attention(
    module: nn.Module, *tensors: Any, treegen: Batch | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend to the batch's levels; return the output [1, T, H, V] and None for the weights.

    The other arguments are those of `read_call`.
    """
    if treegen is None:
        return _compiled_attention(module, *tensors, **options), None
    call = read_call(module, *tensors, **options)
    pool = treegen.layers[call.layer]
    q_THK = call.q_THK
    if (scaling := scaling_of(module)) is not None:
        q_THK = scale_queries(q_THK, treegen.positions_T, *scaling)
    new = q_THK, call.k_TGK, call.v_TGV
    attend_options: AttendOptions = {
        "scale": call.scale,
        "window": call.window,
        "chunk": call.chunk,
        "softcap": call.softcap,
        "sinks": call.sinks_H,
    }
    if call.latent is not None:
        out_THV = write_and_attend_latents(
            *new, pool.keys, get_up_projection(module), treegen, call.selected_TS, **attend_options
        )
    else:
        out_THV = write_and_attend(
            *new, pool.keys, pool.values, treegen, call.selected_TS, **attend_options
        )
    return out_THV[None], None


def _compiled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend inside a compiled layer, whose options were checked before it was compiled."""
    keys = getattr(module, KEYS, None)
    if keys is None:
        raise make_keyword_error(module)
    is_latent = is_latent_layer(module)
    operators = torch.ops.treegen
    selected = _find_selection(module, attention_mask, options)
    q_THK = query[0].transpose(0, 1)
    if (scaling := scaling_of(module)) is not None:
        q_THK = operators.scale_queries(q_THK, *scaling)
    out_THV: Tensor = operators.write_and_attend(
        q_THK,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        get_up_projection(module) if is_latent else getattr(module, VALUES),
        is_latent,
        options.get("s_aux"),
        options.get("scaling"),
        options.get("sliding_window") or None,
        getattr(module, CHUNK),
        options.get("softcap") or None,
        None if selected is None or is_empty(selected) else selected[0],
    )
    return out_THV[None]


def _probe(
    module: nn.Module, *tensors: Any, treegen: Probe | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Record the call in the `Probe` passed as `treegen`. Return an output without values.

    The other arguments are those of `read_call`.
    """
    if treegen is None:
        raise make_keyword_error(module)
    call = read_call(module, *tensors, **options)
    query, key, value, *_ = tensors
    treegen.add(module, call, key, value)
    _, num_heads, num_tokens, _ = query.shape
    width = value.shape[-1] if call.latent is None else call.latent.v_dim
    return query.new_empty(1, num_tokens, num_heads, width), None


def make_keyword_error(module: nn.Module) -> ModelError:
    """Return the error for a layer that calls attention without treegen's keyword."""
    return ModelError(
        f"{type(module).__name__} does not pass keyword arguments to attention, so treegen "
        "cannot use the model; use another model (docs/limitations.md)"
    )


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _probe)
