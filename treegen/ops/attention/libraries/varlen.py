"""Kernels of libraries: FlashAttention-2 (torch's or flash-attn), FlashAttention-4, xformers.

All are told where the keys of a sequence start and how many there are. So sequences may lie
anywhere in a pool, and overlap. The page tables of FlashAttention-2 are not used: it takes no pages
of fewer than 256 tokens.

Legend: N packed rows, H query heads, K key heads, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from treegen.errors import InputError, install
from treegen.ops.attention.libraries import imports
from treegen.ops.attention.libraries.base import KernelCall, Library
from treegen.ops.attention.libraries.units import KEYS, ROWS, SLOT
from treegen.ops.attention.types import AttentionOptions, KVPair


class FlashAttention2(Library):
    """FlashAttention-2, from the package flash-attn if it is installed, else torch's own."""

    name = "flash"

    def __init__(self) -> None:
        self._package = imports.load_flash_attn_2()
        self.softcaps = self._package is not None

    def refusal(self, device: torch.device) -> str | None:
        """Torch must have been built with the kernels if there is no package."""
        reason = super().refusal(device)
        available = self._package is not None or torch.backends.cuda.is_flash_attention_available()
        if reason is None and not available:
            reason = f"this torch was built without FlashAttention; {install('flash-attn')}"
        return reason

    def run(
        self,
        q_NHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        call: KernelCall,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """One call of the package or of torch."""
        q_ends_U1, k_start_U1, k_len_U1 = call.ends_3U
        sequences = q_NHD, k_SKD, v_SKD, q_ends_U1, k_start_U1, call.max_q, call.max_k, 0.0
        more: dict[str, Any] = {
            "seqused_k": k_len_U1[:-1],
            "window_size_left": -1 if call.window is None else call.window - 1,
            "window_size_right": 0 if call.causal else -1,
        }
        scale, causal = options.scale, call.causal
        if self._package is not None:
            softcap = options.softcap or 0.0
            out_NHD, lse_HN, *_ = self._package(*sequences, scale, causal, softcap=softcap, **more)
        else:
            out_NHD, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
                *sequences, causal, False, scale=scale, **more
            )
        return out_NHD, lse_HN


class FlashAttention4(Library):
    """FlashAttention-4, from the package flash-attn-4, for Hopper and Blackwell.

    Its last step over the keys of a unit reads on to the end of a block, and multiplies what it
    finds there by 0. So slots that hold no key have to hold finite values. In the pools of an LLM
    they do.
    """

    name = "flash4"
    softcaps = True

    def __init__(self) -> None:
        self._compiled: set[Any] = set()

    def refusal(self, device: torch.device) -> str | None:
        """There must be the package. Its kernels for older GPUs are not tested, so not used."""
        reason = super().refusal(device)
        if reason is None and torch.cuda.get_device_capability(device)[0] not in (9, 10):
            reason = "needs compute capability 9.0 (Hopper) or 10.x (Blackwell)"
        if reason is None:
            try:
                imports.load_flash_attn_4()
            except ImportError as error:
                reason = f"flash-attn-4 cannot be imported ({error}); {install('flash4')}"
        return reason

    def _check(self, q_THD: Tensor, pairs: Sequence[KVPair], options: AttentionOptions) -> None:
        super()._check(q_THD, pairs, options)
        width = q_THD.shape[2]
        if 128 < width < 256 and torch.cuda.get_device_capability(q_THD.device)[0] > 9:
            raise InputError(
                "impl 'flash4' takes no width between 128 and 256 on a Blackwell GPU, got "
                f"{width}; use 'triton' or 'reference'"
            )

    def run(
        self,
        q_NHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        call: KernelCall,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """One call. A kernel is compiled at the first call of its kind, in some seconds.

        To tell how long units are would make more kinds, and gain nothing on Hopper.
        """
        q_ends_U1, k_start_U1, k_len_U1 = call.ends_3U
        per_head = q_NHD.shape[1] // k_SKD.shape[1]
        many = len(call.units_U5) > 256  # these are found by another kind of search
        kind = (
            q_NHD.dtype,
            q_NHD.shape[2],
            per_head,
            call.causal,
            call.window is None,
            many,
            options.softcap,
        )
        with nullcontext() if kind in self._compiled else imports.suppress_warnings():
            out_NHD, lse_HN = imports.load_flash_attn_4()(
                q_NHD,
                k_SKD,
                v_SKD,
                cu_seqlens_q=q_ends_U1,
                cu_seqlens_k=k_start_U1,
                seqused_k=k_len_U1[:-1],
                softmax_scale=options.scale,
                causal=call.causal,
                window_size=(None if call.window is None else call.window - 1, None),
                softcap=options.softcap or 0.0,
                return_lse=True,
            )
        self._compiled.add(kind)
        return out_NHD, lse_HN


class XFormers(Library):
    """Whichever kernel xformers chooses. It has no mask for gaps and windows together."""

    name = "xformers"
    windows = False

    def __init__(self) -> None:
        self._missing: str | None = None
        try:
            xformers, self._fmha = imports.xformers()
        except ImportError as error:
            self._missing = f"xformers cannot be imported ({error}); {install('xformers')}"
            return
        if not getattr(xformers, "_has_cpp_library", True):
            told = "xformers was built for another torch or CUDA and cannot load its kernels"
            self._missing = told

    def refusal(self, device: torch.device) -> str | None:
        """There must be the package, with its kernels."""
        return self._missing or super().refusal(device)

    def run(
        self,
        q_NHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        call: KernelCall,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """One call. Keys and values are expanded along one more dimension for grouped heads.

        Raises:
            InputError: no kernel of xformers takes the tensors.
        """
        if "mask" not in call.memo:
            masks = self._fmha.attn_bias
            kind = masks.BlockDiagonalGappyKeysMask
            if call.causal:
                kind = masks.BlockDiagonalCausalWithOffsetGappyKeysMask
            rows_U, slot_U, keys_U = call.units_U5[:, [ROWS, SLOT, KEYS]].T
            starts = [*slot_U.tolist(), len(k_SKD)]
            call.memo["mask"] = kind.from_seqlens(
                (rows_U * call.folded).tolist(), starts, keys_U.tolist(), device=q_NHD.device
            )
        per_head = q_NHD.shape[1] // k_SKD.shape[1]
        try:
            out, lse = self._fmha.memory_efficient_attention_partial(
                q_NHD.unflatten(1, (-1, per_head))[None],
                *(x[None, :, :, None].expand(-1, -1, -1, per_head, -1) for x in (k_SKD, v_SKD)),
                attn_bias=call.memo["mask"],
                scale=options.scale,
            )
        except NotImplementedError as error:  # it lists its kernels with their reasons
            told = " ".join(str(error).split())
            raise InputError(
                f"impl 'xformers': {told}; take another impl, or leave it out"
            ) from None
        return out[0].flatten(1, 2), lse[0].flatten(0, 1)
