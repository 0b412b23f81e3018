"""A stock transformers model that decodes many branches of shared prompts in one pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treegen.cache.pool import LayerKV
from treegen.device import current
from treegen.errors import CapacityError, InputError, ModelError
from treegen.formats import format_bytes
from treegen.model.batch import Batch
from treegen.model.files import one_line
from treegen.spec import ModelSpec

if TYPE_CHECKING:
    from treegen.model.compiled import CompiledLayers

# T tokens of a pass, S rows whose logits are wanted, V vocabulary


class Model:
    """A loaded model: its shape, its weights on one device, and one forward pass.

    module is the transformers model; impl is how attention over the levels is computed;
    fingerprint stands for the weights and the tokenizer in records of a run.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        fingerprint: str,
        impl: str = "auto",
    ) -> None:
        self.module = module
        self.spec = spec
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.impl = impl
        self.device: torch.device = module.device
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._compiled: CompiledLayers | None = None
        self._weights_at: tuple[int, ...] | None = None
        self.uncompiled_because = ""

    def reset(self) -> None:
        """Forget compiled layers and CUDA graphs, and with them the page pools they hold."""
        self._uncompile()
        self._weights_at = None
        self.uncompiled_because = ""

    def compile_layers(self, pools: Sequence[LayerKV], *, backend: str = "inductor") -> None:
        """Compile the layers, from now on for batches on these page pools only.

        A model that cannot be compiled goes on without; `uncompiled_because` then says why.
        """
        from treegen.model.compiled import CompiledLayers

        self._uncompile()
        try:
            self._compiled = CompiledLayers(self.module, pools, backend=backend)
        except ModelError as error:
            self.uncompiled_because = str(error)
        self.watch_weights()

    def _uncompile(self) -> None:
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    def watch_weights(self) -> None:
        """From now on, `check_weights` raises if a weight is replaced."""
        self._weights_at = self._addresses()

    def check_weights(self) -> None:
        """Raise ModelError if joined layers or CUDA graphs would go on to read replaced weights.

        What is written into weights in place is read.
        """
        if self._weights_at not in (None, self._addresses()):
            raise ModelError(
                "weights of the module were replaced after it was compiled or captured; write into "
                "them in place, as load_state_dict does without assign, or make a new LLM of it"
            )

    def _addresses(self) -> tuple[int, ...]:
        return tuple(weight.data_ptr() for weight in self.module.parameters())

    def new_cache(self, num_pages: int, page_size: int) -> list[LayerKV]:
        """Return one zeroed page pool for each attention layer.

        Layers that use the keys and values of an earlier layer get that layer's pool: they write
        the same numbers into the same places. Zeroed, because a kernel may read past the last key
        of a page and multiply what it finds there by zero.
        """
        if num_pages < 1 or page_size < 1:
            raise InputError(
                f"a cache needs pages, got num_pages {num_pages} and page_size {page_size}"
            )
        try:
            return self._new_cache(num_pages, page_size)
        except (torch.OutOfMemoryError, MemoryError):
            size = num_pages * page_size * self.spec.kv_bytes_per_token
        raise CapacityError(
            f"a cache of {format_bytes(size)} is more than is free on {self.device}; give it less "
            "(memory=, --memory)"
        )

    def _new_cache(self, num_pages: int, page_size: int) -> list[LayerKV]:
        pools: list[LayerKV] = []
        for layer in self.spec.layers:
            if layer.shared_with is not None:
                pools.append(pools[layer.shared_with])
                continue
            shape = (num_pages, page_size, layer.kv_heads)
            pools.append(
                LayerKV(
                    _zeros((*shape, layer.k_dim), self.dtype, self.device),
                    _zeros((*shape, layer.v_dim), self.dtype, self.device),
                )
            )
        return pools

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the rows batch.logits_at_S, [S, V] in the model's own type.

        The keys and values of the batch's tokens are in batch.layers afterwards.
        """
        # Only the last token of a text to score may stand past the context. What is computed of it
        # is not used, but tables of positions have no place for it.
        positions_T = batch.positions_T.clamp(max=self.spec.context_length - 1)
        with current(self.device):
            return self._forward(replace(batch, positions_T=positions_T))

    def _forward(self, batch: Batch) -> Tensor:
        if self._compiled is None:
            return self._run(batch, batch)
        assert self._compiled.serves(batch), "a compiled model is given other page pools"
        from treegen.model.compiled import CompileErrors, passing

        try:
            with passing(batch):
                return self._run(batch, None)
        except CompileErrors as error:
            # What the layers have written by then is written again.
            self._uncompile()
            self.uncompiled_because = f"the layers cannot be compiled: {one_line(error)}"
            return self._run(batch, batch)

    def _run(self, batch: Batch, passed: Batch | None) -> Tensor:
        """Logits of a batch. passed: what attention is given; None if it sees the batch itself."""
        # The model's own head runs on the rows wanted, so that what a family does to its logits
        # (scaling, soft caps) is done to ours.
        rows = {"logits_to_keep": batch.logits_at_S} if self._keeps_rows else {}
        logits_SV: Tensor = self.module(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            attention_mask=None,
            use_cache=False,
            treegen=passed,
            **rows,
        ).logits[0]
        if not self._keeps_rows:
            logits_SV = logits_SV[batch.logits_at_S]
        if logits_SV.shape != (len(batch.logits_at_S), self.spec.vocab_size):
            raise ModelError(
                f"{self.spec.model_type} returned logits {tuple(logits_SV.shape)} for "
                f"{len(batch.logits_at_S)} rows and {self.spec.vocab_size} tokens; not supported"
            )
        return logits_SV


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system backs them with memory only as they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )
