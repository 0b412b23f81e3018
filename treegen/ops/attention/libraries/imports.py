"""Imports of packages with attention kernels, in any combination of installed packages.

flash-attn and flash-attn-4 share the name flash_attn: the former is that package, the latter adds
flash_attn.cute to it. So flash_attn may be importable without the functions of FlashAttention-2.
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


def xformers() -> tuple[Any, Any]:
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
