"""Layers of a stock model compiled by region: one graph for all of them, whatever the rows.

What a layer does beside matrix products (norms, rotary embedding, activations, residuals) is a
quarter of a decode step's time where each operation is a kernel of its own; the compiler fuses it.

To write keys and values and to attend is one custom operator, which the compiler does not look
into. The batch reaches it around the traced code, so the compiled graph depends on nothing that
changes from pass to pass. The page pools are buffers of the attention modules, so one graph serves
all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor, nn

from treegen.cache.pool import LayerKV
from treegen.errors import ModelError
from treegen.model.batch import Batch
from treegen.model.gated import GatedLinears
from treegen.model.hook import ATTENTION, KEYS, PROBE, VALUES, Probe, write_and_attend
from treegen.model.joined import JoinedLinears
from treegen.model.text_part import attention_of_text

# T tokens, H query heads, G key-value heads, K key dim, V value dim

CompileErrors = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
"""Errors of the compiler. They come in the first pass, which is when layers are compiled."""
_MOST_GRAPHS = 64  # dynamo counts the graphs of all layers of all models together

_current: ContextVar[Batch] = ContextVar("treegen_batch")


@contextmanager
def passing(batch: Batch) -> Iterator[None]:
    """While open, the operator attends by this batch."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


@torch.library.custom_op("treegen::write_and_attend", mutates_args=("keys", "values"))
def _write_and_attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks_H: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`treegen.model.hook.write_and_attend` on the batch of this pass."""
    batch = _current.get()
    return write_and_attend(
        q_THK, k_TGK, v_TGV, keys, values, batch.slots_T, batch.levels,
        scale=scale, window=window, softcap=softcap, sinks=sinks_H,
    ).contiguous()  # fmt: skip


@_write_and_attend.register_fake
def _(
    q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, keys: Tensor, values: Tensor, *options: Any
) -> Tensor:
    return q_THK.new_empty(q_THK.shape[0], q_THK.shape[1], values.shape[-1])


class CompiledLayers:
    """The layers of one transformers model, compiled for one set of page pools."""

    def __init__(
        self, module: nn.Module, pools: Sequence[LayerKV], *, backend: str = "inductor"
    ) -> None:
        """Prepare the layers; the first pass compiles them.

        pools: the page pool of each layer.
        backend: the compiler's backend, as in `torch.compile`.

        Raises:
            ModelError: the layers cannot be told apart.
        """
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, _MOST_GRAPHS)
        self._module, self._pools = module, pools
        self._layers = _decoder_layers(module, len(pools))
        attentions = _attention_modules(module, len(pools))
        self._joined = JoinedLinears(module, lambda: _probed(module))
        self._gated = GatedLinears(module, lambda: _probed(module))
        if pools[0].keys.device.type == "cuda":
            # Each joined weight was copied to a new place. torch keeps the old places, which are
            # too small for the next joined weight.
            torch.cuda.empty_cache()
        for attention, pool in zip(attentions, pools, strict=True):
            attention.register_buffer(KEYS, pool.keys, persistent=False)
            attention.register_buffer(VALUES, pool.values, persistent=False)
        for layer in self._layers:
            layer.compile(backend=backend, dynamic=True, fullgraph=True)

    def serves(self, batch: Batch) -> bool:
        """Whether a batch is on the pools that the layers were compiled for."""
        return batch.layers[0].keys is self._pools[0].keys

    def undo(self) -> None:
        """Let the layers run uncompiled again, on any pools."""
        self._gated.undo()
        self._joined.undo()
        for layer in self._layers:
            layer._compiled_call_impl = None
        for part in self._module.modules():
            part._buffers.pop(KEYS, None)
            part._buffers.pop(VALUES, None)


def _decoder_layers(module: nn.Module, num_layers: int) -> list[nn.Module]:
    stacks = [
        part for part in module.modules()
        if isinstance(part, nn.ModuleList) and len(part) == num_layers
    ]  # fmt: skip
    if len(stacks) != 1:
        raise ModelError(f"the model has {len(stacks)} stacks of {num_layers} layers, not one")
    return list(stacks[0])


def _attention_modules(module: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the module that calls attention, for each layer."""
    probe = _probed(module)
    if [call.layer for call in probe.calls] != list(range(num_layers)):
        raise ModelError("the model's layers do not call attention once each, in order")
    return probe.modules


@torch.inference_mode()
def _probed(module: Any) -> Probe:
    """Run one token and return how the layers call attention."""
    probe = Probe()
    ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    module.set_attn_implementation(attention_of_text(module.config, PROBE))
    try:
        module(input_ids=ids_11, position_ids=ids_11, use_cache=False, treegen=probe)
    finally:
        module.set_attn_implementation(attention_of_text(module.config, ATTENTION))
    return probe
