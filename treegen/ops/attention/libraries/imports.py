"""Imports of the packages whose kernels attend, whichever of them stand beside each other.

flash-attn and flash-attn-4 share the name flash_attn: the former is that package, the latter puts
flash_attn.cute into it. So flash_attn may be there without the functions of FlashAttention-2.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def load_flash_attn_2() -> Any:
    """The forward function of flash-attn; None if that is not installed or cannot be loaded.

    The public function has no argument for the number of keys used.
    """
    try:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward
    except ImportError:
        return None
    return _flash_attn_varlen_forward


@cache
def load_flash_attn_4() -> Any:
    """The function of flash-attn-4 for sequences of unequal lengths. The import takes seconds.

    Raises:
        ImportError: it is not installed, or it or what it needs cannot be loaded.
    """
    try:
        with suppress_warnings():
            from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        raise
    except Exception as error:  # pre-releases that do not fit each other, libraries of CUDA
        reason = " ".join(str(error).split())
        raise ImportError(f"{type(error).__name__}: {reason}") from error
    return flash_attn_varlen_func


def xformers() -> tuple[Any, Any]:
    """The modules xformers and xformers.ops.fmha.

    Raises:
        ImportError: xformers is not installed or cannot be loaded.
    """
    with _whole_flash_attn():
        import xformers
        from xformers.ops import fmha
    return xformers, fmha


@contextmanager
def _whole_flash_attn() -> Iterator[None]:
    """Hide flash_attn where it is flash-attn-4 alone: xformers would take it for flash-attn."""
    found = importlib.util.find_spec("flash_attn")
    if found is None or found.origin is not None:
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
    """Drop warnings: those of flash-attn-4 and of its compiler are for its authors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
