"""A stock transformers model that decodes many branches of shared prompts in one pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from treegen.common.device import use_device, without_autocast
from treegen.common.formatting import format_bytes, summarize_error
from treegen.common.spec import ModelSpec
from treegen.errors import CapacityError, InputError, ModelError, arg
from treegen.model.batch import Batch, use_batch
from treegen.model.checkpoint.families import has_loops
from treegen.model.latent import get_up_projection, is_latent_layer
from treegen.model.linear.batch_invariant import BatchInvariantLayers
from treegen.model.linear.blas import prefer_fast_blas
from treegen.model.linear.experts import GroupedLayers
from treegen.model.recurrent.layer_states import forward_options
from treegen.model.recurrent.layers import SlotPass, StatePass, use_states, wrap_recurrent
from treegen.model.recurrent.operators import has_operators
from treegen.model.recurrent.state_batch import states_of_rows, use_slots
from treegen.model.reproducible import (
    IMPL,
    RECURRENT_IN_TRANSFORMERS,
    build_warmup_batch,
    check_experts,
    check_recurrence,
    compiler_options,
    disable_split_k,
    pad_batch,
    reproducible_spec,
)
from treegen.ops.attention.latent import write_expanded
from treegen.ops.attention.types import FP8
from treegen.ops.cache.pool import LayerKV

if TYPE_CHECKING:
    from treegen.model.compiled import CompiledLayers
    from treegen.model.parallel.ranks import Ranks
    from treegen.model.vision import VisionTower
    from treegen.prompts.images.table import ImageTable

# T tokens of a pass, S rows whose logits are returned, V vocabulary, L latents to expand


class Model:
    """A loaded model: its shape, its weights on one device, and one forward pass.

    Attributes:
        module: The transformers model.
        spec: Its shape.
        dtype: The type of activations and of weights that are not quantized.
        cache_dtype: The type of keys and values in the cache.
        fingerprint: Hex digits that identify the weights and the tokenizer in the records of a run;
            empty for a module that was already in memory.
        quantization: "fp8" if matrices are multiplied in 8 bits; None if they are multiplied in
            `dtype`.
        impl: The attention implementation.
        device: The device of the weights.
        uncompiled_because: Why the layers could not be compiled; empty if they were.
        fixed_because: Why the weights cannot be updated; empty if they can.
        ranks: The processes of a tensor-parallel model; None if this process computes all of it.
        tower: The encoder of images; None for a model that was loaded for text only.
        images: The images of prompts; None if prompts have text only.
        close: Ends the other ranks.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        fingerprint: str,
        quantization: str | None = None,
        impl: str = "auto",
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.close: Callable[[], object] = lambda: None
        self.module = module
        self.spec = spec
        self.dtype = dtype
        self.cache_dtype = dtype if spec.itemsize == dtype.itemsize else FP8
        self.fingerprint = fingerprint
        self.quantization = quantization
        self.impl = impl
        self.device: torch.device = module.device
        self.tower: VisionTower | None = None
        self.images: ImageTable | None = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._forward_options = forward_options(module)
        self._compiled: CompiledLayers | None = None
        self._weights_at: tuple[int, ...] | None = None
        self.uncompiled_because = self.fixed_because = ""
        self._reproducible, self._stock_spec = False, spec
        self._grouped: GroupedLayers | None = None
        self._fixed: BatchInvariantLayers | None = None
        self._by_operators = False
        text = module.config.get_text_config(decoder=True)
        self._has_loops = has_loops(text)
        self._width: int = getattr(text, "hidden_size", None) or 0
        self._latents = sorted(
            (part for part in module.modules() if is_latent_layer(part)),
            key=lambda part: int(part.layer_idx),
        )
        if spec.states:
            layers = [layer.module for layer in wrap_recurrent(module)]
            self._by_operators = has_operators(layers, spec.states, dtype)

    def reset(self) -> None:
        """Discard compiled layers and CUDA graphs, and with them the page pools that they hold."""
        self._uncompile()
        self._weights_at = None
        self.uncompiled_because = ""
        if self._reproducible:
            self._reproducible, self.spec = False, self._stock_spec
        for changed in (self._fixed, self._grouped):
            if changed is not None:
                changed.undo()
        self._fixed = self._grouped = None

    def make_reproducible(self) -> None:
        """Make each row's numbers bitwise independent of the other rows in its batch.

        This holds only if attention is computed that way too (`impl="invariant"`). It also changes
        how torch computes matrix products in this process.

        Raises:
            InputError: a layer of the model cannot do this.
        """
        spec = reproducible_spec(self.spec, self.device)
        check_recurrence(self.module, spec, self._by_operators)
        disable_split_k()
        if not self._reproducible:
            self._reproducible, self._stock_spec = True, self.spec
        self.spec = spec
        if self._grouped is None:
            self._grouped = GroupedLayers(self.module)
            check_experts(self.module, self.spec)
            self._fixed = BatchInvariantLayers(self.module)

    def compile_layers(
        self,
        pools: Sequence[LayerKV],
        states: Sequence[Sequence[Tensor]] = (),
        *,
        backend: str = "inductor",
    ) -> None:
        """Compile the layers. The model then accepts only batches that use these page pools.

        A model that cannot be compiled runs uncompiled; `uncompiled_because` then says why.

        Args:
            pools: One page pool for each attention layer, as from `new_cache`.
            states: The state tensors of each recurrent layer, as from `new_states`.
            backend: The compiler backend, as in `torch.compile`.
        """
        from treegen.model.compiled import CompiledLayers

        self._uncompile()
        if self.spec.states and not self._by_operators:
            self.uncompiled_because = f"{RECURRENT_IN_TRANSFORMERS}, which treegen does not compile"
            return
        options = compiler_options() if self._reproducible else None
        try:
            self._compiled = CompiledLayers(
                self.module, pools, states, backend=backend, options=options
            )
        except ModelError as error:
            self.uncompiled_because = str(error)
        self.watch_weights()
        if self._compiled is not None and states:
            # Compile on spare slots: if the compiler fails in a later layer, the states of
            # earlier layers must not have advanced.
            impl = IMPL if self._reproducible else self.impl
            batch = build_warmup_batch(pools, self.device, impl)
            spare_slots = np.zeros((2, len(batch.tokens_T)), dtype=np.int64)
            self.forward(replace(batch, states=states_of_rows(spare_slots, states)))
        elif self._compiled is not None and self._reproducible:
            self.forward(build_warmup_batch(pools, self.device))

    def _uncompile(self) -> None:
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    def watch_weights(self) -> None:
        """Record the memory addresses of the weights for `check_weights`."""
        self._weights_at = _addresses(list(self.module.parameters()))

    def check_weights(self) -> tuple[int, ...]:
        """Check that the weights are still where merged layers and CUDA graphs read them.

        Writing new numbers into the weights in place is allowed.

        Returns:
            The addresses and version counters of the weights. They change when a weight is replaced
                or written into, except through `.data`.

        Raises:
            ModelError: a weight was replaced by another tensor.
        """
        weights = list(self.module.parameters())  # listing them takes milliseconds
        addresses = _addresses(weights)
        if self._weights_at not in (None, addresses):
            raise ModelError(
                "weights of the module were replaced after the module was compiled or "
                "captured; update the old tensors in place (load_state_dict without "
                "assign=True), or create a new LLM from the module"
            )
        return (*addresses, *get_versions(weights))

    def new_cache(
        self, num_pages: int, page_size: int, dtype: torch.dtype | None = None
    ) -> list[LayerKV]:
        """Return one page pool for each attention layer, filled with zeros.

        A layer that uses the keys and values of an earlier layer gets the pool of that layer. Both
        layers then write the same numbers into the same slots. The zeros matter because a kernel
        may read past the last key of a page and multiply the result by zero, which must not give
        NaN.

        Args:
            num_pages: Pages in each pool, at least 1.
            page_size: Tokens per page, at least 1.
            dtype: The type of keys and values. Default: `cache_dtype`.

        Raises:
            InputError: num_pages or page_size is less than 1.
            CapacityError: the device has not enough free memory.
        """
        if num_pages < 1 or page_size < 1:
            raise InputError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        try:
            return self._new_cache(num_pages, page_size, dtype or self.cache_dtype)
        except (torch.OutOfMemoryError, MemoryError):
            size = num_pages * page_size * self.spec.kv_bytes_per_token
        raise CapacityError(
            f"a cache of {format_bytes(size)} exceeds the free memory of {self.device}; set a "
            f"smaller cache ({arg('memory=')})"
        )

    def new_states(self, num_slots: int, num_windows: int = 0) -> list[list[Tensor]]:
        """Return the state tensors of each recurrent layer, filled with zeros.

        Args:
            num_slots: State slots of each tensor.
            num_windows: Additional slots of convolution windows, which follow the others. They are
                for rows that keep update lists.

        Raises:
            CapacityError: the device has not enough free memory.
        """
        try:
            return [
                [
                    _zeros(
                        (num_slots + num_windows * (state.kind == "conv"), *state.shape),
                        getattr(torch, state.dtype),
                        self.device,
                    )
                    for state in states
                ]
                for states in self.spec.states
            ]
        except (torch.OutOfMemoryError, MemoryError):
            size = num_slots * self.spec.state_bytes
        raise CapacityError(
            f"{num_slots:,} states of {format_bytes(self.spec.state_bytes)} "
            f"({format_bytes(size)} in total) exceed the free memory of {self.device}; set a "
            f"smaller cache ({arg('memory=')}, --memory)"
        )

    def _new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype) -> list[LayerKV]:
        pools: list[LayerKV] = []
        for layer in self.spec.layers:
            index = None
            if layer.index_dim:
                index = _zeros((num_pages, page_size, layer.index_dim), dtype, self.device)
            if layer.shared_with is not None:
                shared = pools[layer.shared_with]
                pools.append(shared if index is None else replace(shared, index=index))
                continue
            shape = (num_pages, page_size, layer.kv_heads)
            keys = _zeros((*shape, layer.k_dim), dtype, self.device)
            if layer.latent is not None:
                values = keys[..., : layer.v_dim]
            else:
                values = _zeros((*shape, layer.v_dim), dtype, self.device)
            pools.append(LayerKV(keys, values, index))
        return pools

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [S, V] of the query rows `batch.logits_at_S`, in the model's own type.

        The pass also writes the keys and values of the batch's tokens into `batch.layers`.

        Raises:
            ModelError: the model returned logits of another shape.
        """
        # The last token of a text to score may lie past the context. Its logits are not used, but
        # the model's position tables have no entry for it.
        last = self.spec.context_length - 1
        positions_T, rotary_AT = batch.positions_T.clamp(max=last), batch.rotary_AT
        has_axes = self.tower is not None and self.tower.has_axes
        rotary_AT = rotary_AT.clamp(max=last) if has_axes and rotary_AT is not None else None
        batch = replace(batch, positions_T=positions_T, rotary_AT=rotary_AT)
        batch = pad_batch(batch) if self._reproducible else batch
        fast_blas = prefer_fast_blas(len(batch.tokens_T), self._width, self.device)
        with use_device(self.device), without_autocast(self.device), fast_blas:
            return self._forward(batch)

    @property
    def can_expand_latents(self) -> bool:
        """Whether all attention layers keep latents from which keys and values can be expanded."""
        return self.spec.latent is not None and len(self._latents) == len(self.spec.layers)

    @torch.inference_mode()
    def write_expanded(self, layers: Sequence[LayerKV], slots_L: Tensor, targets_L: Tensor) -> None:
        """Compute the keys and values of all heads from latents and write them into expanded pages.

        Args:
            layers: The page pool of each attention layer. It holds the latents and the expanded
                copies.
            slots_L: int64 [L], the cache slots of the latents: page * page_size + offset.
            targets_L: int64 [L], where the expanded keys and values go: block * page_size + offset.
        """
        form = self.spec.latent
        assert form is not None
        with use_device(self.device), without_autocast(self.device):
            for part, pool in zip(self._latents, layers, strict=True):
                write_expanded(
                    pool.keys, slots_L, targets_L, get_up_projection(part), form, self.dtype
                )

    def _forward(self, batch: Batch) -> Tensor:
        if batch.states is not None:
            with use_slots(batch.states):
                return self._run_compiled(batch)
        assert not self.spec.states, "a model with recurrent layers is given no states"
        return self._run_compiled(batch)

    def _run_compiled(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, from compiled layers if there are any and they compile."""
        if self._compiled is None:
            return self._run_stock(batch)
        assert self._compiled.can_run(batch), "a compiled model is given other page pools"
        from treegen.model.compiled import CompileErrors

        try:
            with use_batch(batch):
                return self._run(batch, None)
        except CompileErrors as error:
            # Layers that ran before the error write their keys and values again.
            self._uncompile()
            self.uncompiled_because = f"the layers cannot be compiled: {summarize_error(error)}"
            return self._run_stock(batch)

    def _run_stock(self, batch: Batch) -> Tensor:
        """Return the logits of a batch from layers that are not compiled."""
        if batch.states is None:
            if self._has_loops:
                return self._run(batch, replace(batch, layers=_PoolIterator(batch.layers)))
            with use_batch(batch):
                return self._run(batch, batch)
        by_operators, states = self._by_operators, batch.states
        state_pass = SlotPass(states) if by_operators else StatePass(states, self.spec.states)
        with use_states(state_pass), use_batch(batch):
            return self._run(batch, replace(batch, layers=_PoolIterator(batch.layers)))

    def _run(self, batch: Batch, passed: Batch | None) -> Tensor:
        """Return the logits [S, V] of a batch.

        Args:
            batch: The batch.
            passed: The batch to hand to the attention function; None for compiled layers, which get
                it from a context variable.
        """
        # The model's own head computes the logits, so family-specific scaling and soft caps apply.
        rows = {"logits_to_keep": batch.logits_at_S} if self._keeps_rows else {}
        positions_AT = batch.positions_T[None] if batch.rotary_AT is None else batch.rotary_AT
        if self.tower is not None:
            self.tower.set_images(batch.images)
        logits_SV: Tensor = self.module(
            input_ids=batch.tokens_T[None],
            position_ids=positions_AT if len(positions_AT) == 1 else positions_AT[:, None],
            attention_mask=None,
            treegen=passed,
            **self._forward_options,
            **rows,
        ).logits[0]
        if not self._keeps_rows:
            logits_SV = logits_SV[batch.logits_at_S]
        width = self.spec.vocab_size
        if batch.gathers_logits:
            logits_SV = self.gather_logits(logits_SV)
        elif self.ranks is not None:
            width = -(-width // self.ranks.size)
        if logits_SV.shape != (len(batch.logits_at_S), width):
            raise ModelError(
                f"{self.spec.model_type} must return logits for {len(batch.logits_at_S)} rows "
                f"and {self.spec.vocab_size} tokens, got shape {tuple(logits_SV.shape)}; use "
                "another model"
            )
        return logits_SV

    def gather_logits(self, logits_SV: Tensor) -> Tensor:
        """Return logits [S, V] over the whole vocabulary, gathered from the parts of all ranks."""
        if self.ranks is None:
            return logits_SV
        return self.ranks.gather_logits(logits_SV, self.spec.vocab_size)


class _PoolIterator(list[LayerKV]):
    """The page pools of attention layers; each access returns the next pool, whatever the index.

    In a hybrid model only some layers attend, and several of them may share one module; a model
    with loops runs a layer several times. The index does not identify the pool then.
    """

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        super().__init__(layers)
        self._layers, self._next = layers, 0

    def __getitem__(self, index: Any) -> Any:
        self._next += 1
        return self._layers[self._next - 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take memory only once they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return data.view(dtype).view(shape)


def _addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


def get_versions(weights: Iterable[Tensor]) -> tuple[int, ...]:
    """Return each weight's version counter. In-place writes change it, except through `.data`."""
    return tuple(0 if weight.is_inference() else weight._version for weight in weights)


def _bump_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a fused optimizer step as torch counts all others, because fused kernels do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for weight in group["params"]:
                if not weight.is_inference():
                    increment_version(weight)


register_optimizer_step_post_hook(_bump_versions)
