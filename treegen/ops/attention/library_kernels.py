"""Library kernels: FlashAttention-2 (torch's or flash-attn), FlashAttention-4, xformers.

Each kernel takes the start and the number of the keys of a sequence. So sequences may be anywhere
in a pool, and overlap. The page tables of FlashAttention-2 are not used, because its pages need at
least 256 tokens.

Any combination of the packages may be installed. flash-attn and flash-attn-4 share the name
flash_attn: the former is that package, the latter adds flash_attn.cute to it. So flash_attn may be
importable without the functions of FlashAttention-2.

Legend: N packed rows, H query heads, K key heads, D dimension, S slots.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treegen.errors import InputError, install
from treegen.ops.attention.library_attention import KEYS, QKV, ROWS, SLOT, KernelCall, Library
from treegen.ops.attention.types import AttentionOptions, KVPairs


class FlashAttention2(Library):
    """FlashAttention-2 from the package flash-attn if it is installed, else from torch."""

    name = "flash"

    def __init__(self) -> None:
        self._package = load_flash_attn_2()
        self.softcaps = self._package is not None

    def refusal(self, device: torch.device) -> str | None:
        """Return why the kernel cannot run on a device; without flash-attn, torch must have it."""
        reason = super().refusal(device)
        available = self._package is not None or torch.backends.cuda.is_flash_attention_available()
        if reason is None and not available:
            reason = f"this torch was built without FlashAttention; {install('flash-attn')}"
        return reason

    def run(self, qkv: QKV, call: KernelCall, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """Call the kernel of the package or of torch once.

        Args:
            qkv: Packed queries [N, H, D], and keys and values of the pool [S, K, D].
            call: The units to compute.
            options: Softmax options of the layer.
        """
        q_ends_U1, k_start_U1, k_len_U1 = call.ends_3U
        sequences = *qkv, q_ends_U1, k_start_U1, call.max_q, call.max_k, 0.0
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
    """FlashAttention-4 from the package flash-attn-4, for Hopper and Blackwell.

    The last step over the keys of a unit reads up to the end of a block, and multiplies the values
    past the last key by 0. So slots without a key must hold finite values, as they do in the pools
    of an LLM.
    """

    name = "flash4"
    softcaps = True

    def __init__(self) -> None:
        self._compiled: set[Any] = set()

    def refusal(self, device: torch.device) -> str | None:
        """Return why the kernel cannot run on a device, or None.

        The package's kernels for GPUs before Hopper are not tested, so they are not used.
        """
        reason = super().refusal(device)
        if reason is None and torch.cuda.get_device_capability(device)[0] not in (9, 10):
            reason = "needs compute capability 9.0 (Hopper) or 10.x (Blackwell)"
        if reason is None:
            try:
                load_flash_attn_4()
            except ImportError as error:
                reason = f"flash-attn-4 cannot be imported ({error}); {install('flash4')}"
        return reason

    def _check(self, q_THD: Tensor, pairs: KVPairs, options: AttentionOptions) -> None:
        super()._check(q_THD, pairs, options)
        width = q_THD.shape[2]
        if 128 < width < 256 and torch.cuda.get_device_capability(q_THD.device)[0] > 9:
            raise InputError(
                "impl 'flash4' does not support a head width between 128 and 256 on a "
                f"Blackwell GPU, got {width}; use 'triton' or 'reference'"
            )

    def run(self, qkv: QKV, call: KernelCall, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """Call the kernel once. The first call of each kind compiles a kernel, which takes seconds.

        The lengths of units are not passed: that would add kinds, and gains nothing on Hopper.

        Args:
            qkv: Packed queries [N, H, D], and keys and values of the pool [S, K, D].
            call: The units to compute.
            options: Softmax options of the layer.
        """
        (q_NHD, k_SKD, _), (q_ends_U1, k_start_U1, k_len_U1) = qkv, call.ends_3U
        per_head = q_NHD.shape[1] // k_SKD.shape[1]
        many = len(call.units_U5) > 256  # the kernel then searches for units in another way
        kind = (
            q_NHD.dtype,
            q_NHD.shape[2],
            per_head,
            call.causal,
            call.window is None,
            many,
            options.softcap,
        )
        with nullcontext() if kind in self._compiled else suppress_warnings():
            out_NHD, lse_HN = load_flash_attn_4()(
                *qkv,
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
    """The kernel that xformers chooses. It has no mask that combines gaps and windows."""

    name = "xformers"
    windows = False

    def __init__(self) -> None:
        self._missing: str | None = None
        try:
            xformers, self._fmha = load_xformers()
        except ImportError as error:
            self._missing = f"xformers cannot be imported ({error}); {install('xformers')}"
            return
        if not getattr(xformers, "_has_cpp_library", True):
            reason = "xformers was built for another torch or CUDA and cannot load its kernels"
            self._missing = reason

    def refusal(self, device: torch.device) -> str | None:
        """Return why xformers cannot be loaded or cannot run on a device, or None."""
        return self._missing or super().refusal(device)

    def run(self, qkv: QKV, call: KernelCall, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """Call the kernel once, with keys and values expanded along a dimension of grouped heads.

        Args:
            qkv: Packed queries [N, H, D], and keys and values of the pool [S, K, D].
            call: The units to compute.
            options: Softmax options of the layer.

        Raises:
            InputError: no kernel of xformers takes the tensors.
        """
        q_NHD, k_SKD, v_SKD = qkv
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
        except NotImplementedError as error:  # the message lists all kernels with their reasons
            reason = " ".join(str(error).split())
            raise InputError(
                f"impl 'xformers': {reason}; use another impl, or remove the argument impl"
            ) from None
        return out[0].flatten(1, 2), lse[0].flatten(0, 1)


def load_flash_attn_2() -> Any:
    """Return flash-attn's internal forward function; None if the package cannot be imported.

    The public function has no argument for the number of keys used.
    """
    try:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward
    except ImportError:
        return None
    return _flash_attn_varlen_forward


@cache
def load_flash_attn_4() -> Any:
    """Return flash-attn-4's function for variable-length sequences. The import takes seconds.

    Raises:
        ImportError: the package is not installed, or it or one of its dependencies fails to load.
    """
    try:
        with suppress_warnings():
            from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        raise
    except Exception as error:  # incompatible pre-releases, missing CUDA libraries
        reason = " ".join(str(error).split())
        raise ImportError(f"{type(error).__name__}: {reason}") from error
    return flash_attn_varlen_func


def load_xformers() -> tuple[Any, Any]:
    """Return the modules xformers and xformers.ops.fmha.

    Raises:
        ImportError: xformers is not installed or cannot be loaded.
    """
    with _whole_flash_attn():
        import xformers
        from xformers.ops import fmha
    return xformers, fmha


@contextmanager
def _whole_flash_attn() -> Iterator[None]:
    """Hide flash_attn from xformers, which mistakes flash-attn-4 alone for flash-attn."""
    spec = importlib.util.find_spec("flash_attn")
    if spec is None or spec.origin is not None:
        yield
        return
    loaded = sys.modules.get("flash_attn")
    sys.modules["flash_attn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["flash_attn"]
        if loaded is not None:
            sys.modules["flash_attn"] = loaded


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings of flash-attn-4 and its compiler, which only its authors can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
