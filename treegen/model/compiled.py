"""Compile the decoder layers of a stock model by region: one graph for all layers and batch sizes.

Apart from matrix products, a layer's operations (norms, rotary embedding, activations, residuals)
take a quarter of a decode step if each is a kernel of its own; the compiler fuses them. Writing
keys and values and attending is one custom operator that the compiler treats as opaque, and it gets
the batch from a context variable, so the graph depends on nothing that changes from pass to pass. A
buffer of the attention module represents the page pool, so one graph serves all layers and pools of
any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor, nn

from treegen.errors import ModelError
from treegen.model.attention_hook import (
    ATTENTION,
    CHUNK,
    KEYS,
    PROBE,
    VALUES,
    Probe,
    write_and_attend,
    write_and_attend_latents,
)
from treegen.model.batch import Batch, current_batch
from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.chunked import chunk_of, scale_queries
from treegen.model.graph_passes import choose_graph_pass
from treegen.model.indexer import INDEX_KEYS, write_and_select
from treegen.model.latent import is_latent_layer, make_subclass
from treegen.model.linear.experts import GroupedLayers
from treegen.model.linear.merged import GatedLinears, MergedLinears
from treegen.model.recurrent.layer_states import forward_options
from treegen.model.recurrent.layers import RecurrentLayer, wrap_recurrent
from treegen.model.recurrent.operators import OPERATORS, forward
from treegen.ops.attention.key_selection import IndexForm
from treegen.ops.cache.pool import LayerKV, make_proxy, resolve_proxy

# T tokens, H query heads, G key heads, K key dim, V value dim, R rank of latents, X numbers of a
# head's key and value that are made from a latent, D numbers of an index key, S selected keys

CompileErrors = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
"""Errors of the compiler. They occur in the first pass, when the layers are compiled."""
_TENSORS = "treegen_windows", "treegen_states"
_MAX_GRAPHS = 64  # dynamo counts the graphs of all layers and models together

# The operators write into pools that the compiler does not see, so they mutate no argument.


@torch.library.custom_op("treegen::write_and_attend", mutates_args=())
def _write_and_attend(  # noqa: PLR0913 -- operators take no structures
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    is_latent: bool,
    sinks_H: Tensor | None,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    selected_TS: Tensor | None,
) -> Tensor:
    """Call a function of `treegen.model.attention_hook` with the batch of this pass.

    With latents it is `write_and_attend_latents`, and `values` are the weights `up_HXR`; otherwise
    it is `write_and_attend`.
    """
    attend = write_and_attend_latents if is_latent else write_and_attend
    return attend(
        q_THK,
        k_TGK,
        v_TGV,
        resolve_proxy(keys),
        values if is_latent else resolve_proxy(values),
        current_batch(),
        selected_TS,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks_H,
    ).contiguous()


@_write_and_attend.register_fake
def _(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    is_latent: bool,
    *_options: Any,
) -> Tensor:
    width = values.shape[-1]
    if is_latent:
        width = values.shape[1] - (q_THK.shape[2] - v_TGV.shape[2])
    return q_THK.new_empty(q_THK.shape[0], q_THK.shape[1], width)


@torch.library.custom_op("treegen::scale_queries", mutates_args=())
def _scale_queries(q_THK: Tensor, floor_scale: float, scale: float) -> Tensor:
    """Call `treegen.model.chunked.scale_queries` with the positions of this pass."""
    positions_T = current_batch().positions_T
    return scale_queries(q_THK, positions_T, floor_scale, scale).contiguous()


@_scale_queries.register_fake
def _(q_THK: Tensor, floor_scale: float, scale: float) -> Tensor:
    return q_THK.new_empty(q_THK.shape)


@torch.library.custom_op("treegen::write_and_select", mutates_args=())
def _write_and_select(
    q_THD: Tensor,
    k_TD: Tensor,
    weights_TH: Tensor | None,
    keys: Tensor,
    num: int,
    size: int,
    is_pooled: bool,
    local: int,
    selections: int,
) -> Tensor:
    """Call `treegen.model.indexer.write_and_select` with the page pool of a proxy."""
    form = IndexForm(num, size, is_pooled, local, selections)
    return write_and_select(q_THD, k_TD, weights_TH, resolve_proxy(keys), form)


@_write_and_select.register_fake
def _(q_THD: Tensor, k_TD: Tensor, weights_TH: Tensor | None, keys: Tensor, *form: Any) -> Tensor:
    heads = q_THD.shape[1:2] if weights_TH is None else ()
    shape = q_THD.shape[0], *heads, IndexForm(*form).width
    return q_THD.new_empty(shape, dtype=torch.int32)


class _SlotStateLayer(nn.Module):
    """A recurrent layer whose buffers represent its states. Layers of a class share this method."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        tensors = [getattr(self, name) for name in _TENSORS if name in self._buffers]
        return forward(self, hidden_states, tensors, OPERATORS)


class CompiledLayers:
    """The layers of one transformers model, compiled for one set of page pools and states."""

    def __init__(
        self,
        module: nn.Module,
        pools: Sequence[LayerKV],
        states: Sequence[Sequence[Tensor]] = (),
        *,
        backend: str = "inductor",
        options: Mapping[str, bool] | None = None,
    ) -> None:
        """Prepare the layers; the first pass compiles them.

        Args:
            module: The transformers model.
            pools: The page pool of each attention layer.
            states: The state tensors of each recurrent layer, all of which must run on treegen's
                operators.
            backend: The compiler backend, as in `torch.compile`.
            options: Further options of Inductor.

        Raises:
            ModelError: the decoder layers or their attention modules cannot be identified.
        """
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, _MAX_GRAPHS)
        self._module, self._pools = module, pools
        recurrent = wrap_recurrent(module) if states else []
        self._layers = _decoder_layers(module, len(pools), [layer.module for layer in recurrent])
        attentions = _attention_modules(module, len(pools), len(self._layers))
        self._joined = MergedLinears(module, lambda: _probe_attention(module))
        self._gated = GatedLinears(module, lambda: _probe_attention(module))
        self._grouped: GroupedLayers | None = None
        if pools[0].keys.device.type == "cuda":
            self._grouped = GroupedLayers(module)
            # Each merged weight was copied to new memory. torch keeps the old blocks, which are
            # too small for the next merged weight.
            torch.cuda.empty_cache()
        for attention, pool in zip(attentions, pools, strict=True):
            setattr(attention, CHUNK, chunk_of(attention))
            attention.register_buffer(KEYS, make_proxy(pool.keys, 2), persistent=False)
            if not is_latent_layer(attention):
                attention.register_buffer(VALUES, make_proxy(pool.values, 2), persistent=False)
            if pool.index is not None:
                indexer = attention.get_submodule("indexer")
                indexer.register_buffer(INDEX_KEYS, make_proxy(pool.index, 2), persistent=False)
        self._wrapped: list[tuple[RecurrentLayer, Any]] = [
            (layer, type(layer.module)) for layer in recurrent
        ]
        for (wrapped, kind), tensors in zip(self._wrapped, states, strict=True):
            for name, tensor in zip(_TENSORS, tensors, strict=False):
                wrapped.module.register_buffer(name, make_proxy(tensor, 1), persistent=False)
            del wrapped.module.forward
            wrapped.module.__class__ = make_subclass(_SlotStateLayer, kind)
        inductor_options: dict[str, Any] | None = None
        if backend == "inductor":
            inductor_options = {"post_grad_custom_pre_pass": choose_graph_pass(), **(options or {})}
        for layer in self._layers:
            layer.compile(backend=backend, dynamic=True, fullgraph=True, options=inductor_options)

    def can_run(self, batch: Batch) -> bool:
        """Return whether a batch uses the pools that the layers were compiled for."""
        return batch.layers[0].keys is self._pools[0].keys

    def undo(self) -> None:
        """Make the layers run uncompiled again, on any pools."""
        if self._grouped is not None:
            self._grouped.undo()
        self._gated.undo()
        self._joined.undo()
        for layer in self._layers:
            layer._compiled_call_impl = None
        for wrapped, kind in self._wrapped:
            wrapped.module.__class__ = kind
            wrapped.module.forward = wrapped
        for part in self._module.modules():
            for name in (KEYS, VALUES, INDEX_KEYS, *_TENSORS):
                part._buffers.pop(name, None)
            vars(part).pop(CHUNK, None)


def _decoder_layers(
    module: nn.Module, num_attending: int, recurrent: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return the stack of decoder layers, which must be the only one that fits the model.

    Each layer attends, is recurrent, does both or, in hybrid models, does neither.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    if not recurrent:
        stacks = [part for part in lists if len(part) == num_attending]
    else:
        inside = [{id(child) for child in part.modules()} for part in lists]
        # The stack must contain every recurrent layer.
        stacks = [
            part
            for part, ids in zip(lists, inside, strict=True)
            if len(part) >= max(len(recurrent), num_attending)
            and all(id(layer) in ids for layer in recurrent)
        ]
    if len(stacks) != 1:
        raise ModelError(f"expected one stack of layers, got {len(stacks)}")
    return list(stacks[0])


def _attention_modules(module: nn.Module, num: int, num_layers: int) -> list[nn.Module]:
    """Return the `num` modules that call attention, each of which must be in a different layer."""
    probe = _probe_attention(module)
    layers = [call.layer for call in probe.calls]
    if len(layers) != num or layers != sorted({*layers} & {*range(num_layers)}):
        raise ModelError("its layers must call attention once each, in order")
    if len({id(attention) for attention in probe.modules}) != num:
        raise ModelError("some of its layers share an attention module")
    return probe.modules


@torch.inference_mode()
def _probe_attention(module: Any) -> Probe:
    """Run the model on one token and return how its layers call attention."""
    probe = Probe()
    ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    module.set_attn_implementation(attention_of_text(module.config, PROBE))
    try:
        module(input_ids=ids_11, position_ids=ids_11, treegen=probe, **forward_options(module))
    finally:
        module.set_attn_implementation(attention_of_text(module.config, ATTENTION))
    return probe
