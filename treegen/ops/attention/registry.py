"""The registry of attention implementations, and the choice of one for a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Final

import torch

from treegen.common.checks import check_argument_types
from treegen.errors import InputError, ModelWarning, arg
from treegen.ops.attention.types import Implementation

# The module and the class of each implementation of treegen.
_BUILT_IN: Final = {
    "cpu": ("cpu_attend", "Cpu"),
    "triton": ("gpu.attend", "Triton"),
    "reference": ("reference", "Reference"),
    "gluon": ("gpu.attend", "Gluon"),
    "invariant": ("gpu.attend", "Invariant"),
    "flash": ("library_kernels", "FlashAttention2"),
    "flash4": ("library_kernels", "FlashAttention4"),
    "xformers": ("library_kernels", "XFormers"),
}


def _load_built_in(module: str, name: str) -> Implementation:
    """Import a module next to this one, and return a new object of a class in it."""
    try:
        kind: type[Implementation] = getattr(import_module(f"{__package__}.{module}"), name)
    except ImportError:
        raise
    except Exception as error:  # a Triton that does not fit torch or the driver may raise anything
        raise ImportError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    return kind()


# An implementation is loaded when it is chosen, so a missing library affects no other
# implementation. "auto" takes the first one that does not refuse the device. "reference" refuses no
# device, so the implementations after it are used only if they are named.
LOADERS: Final[dict[str, Callable[[], Implementation]]] = {
    name: partial(_load_built_in, *module_and_name) for name, module_and_name in _BUILT_IN.items()
}
_READ_FP8: Final = ("auto", "cpu", "triton", "gluon", "invariant", "reference")


@check_argument_types
def register(name: str, load: Callable[[], Implementation], *, auto: bool = True) -> None:
    """Add an implementation under a name.

    Args:
        name: A name that no other implementation has.
        load: Returns the implementation; called each time the implementation is chosen.
        auto: Whether "auto" may take it, in preference to those registered earlier. If not, it is
            used only if it is named.

    Raises:
        InputError: the name is taken.
    """
    if name in LOADERS or name == "auto":
        raise InputError(
            f"an attention implementation named {name!r} already exists; choose another name"
        )
    if not auto:
        LOADERS[name] = load
        return
    earlier = dict(LOADERS)
    LOADERS.clear()
    LOADERS.update({name: load, **earlier})


def choose(impl: str, device: torch.device) -> Implementation:
    """Load the named implementation, or for "auto" the first that runs on the device.

    Warns once if a GPU gets another implementation because an import failed.

    Raises:
        InputError: no implementation has the name, or no permitted one runs on the device.
    """
    if not isinstance(impl, str) or (impl != "auto" and impl not in LOADERS):
        raise InputError(
            f"{arg('impl')} must be auto or one of {', '.join(sorted(LOADERS))}, got {impl!r}"
        )
    reasons, not_imported = [], []
    for name in LOADERS if impl == "auto" else [impl]:
        loaded = _import(name)
        reason = loaded if isinstance(loaded, str) else loaded.refusal(device)
        if isinstance(loaded, str):
            not_imported.append(f"{name}: {loaded}")
        elif reason is None:
            if not_imported and device.type == "cuda":
                _warn_of_fallback(name, "; ".join(not_imported))
            return loaded
        reasons.append(f"{name}: {reason}")
    if not_imported:
        reasons.append(f"install the package again, or use another {arg('impl')}")
    raise InputError(f"attention impl {impl!r} cannot run on {device}; {'; '.join(reasons)}")


def load(name: str, device: torch.device) -> Implementation | str:
    """Return the named implementation, or the reason why it cannot run on a device."""
    loaded = _import(name)
    return loaded if isinstance(loaded, str) else loaded.refusal(device) or loaded


def _import(name: str) -> Implementation | str:
    """Return the named implementation, or the reason why it cannot be imported."""
    try:
        return LOADERS[name]()
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return f"{error.name} is not installed"
        return f"cannot be imported: {' '.join(str(error).split()) or type(error).__name__}"


@cache
def _warn_of_fallback(name: str, reasons: str) -> None:
    """Warn, once per process, that a GPU uses an implementation because others are broken.

    Args:
        name: The implementation that is used.
        reasons: The names of the others, with the errors.
    """
    warnings.warn(
        f"attention on the GPU uses impl {name!r}, which may be much slower, because another "
        f"implementation cannot be used ({reasons}); install the package again",
        ModelWarning,
        stacklevel=4,
    )


def check_reads_fp8(impl: str) -> None:
    """Check that a built-in implementation reads keys and values in FP8.

    Raises:
        InputError: the implementation does not read FP8.
    """
    if impl in LOADERS and impl not in _READ_FP8:
        raise InputError(
            f"attention impl {impl!r} does not support an FP8 KV cache; use 'triton' or 'reference'"
        )
