"""The registry of attention implementations, and the choice of one for a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final

import torch

from treegen.common.checks import check_argument_types
from treegen.errors import InputError, arg
from treegen.ops.attention.types import Implementation

# The module and the class of each implementation of treegen.
_OWN: Final = {
    "cpu": ("cpu_attend", "Cpu"),
    "triton": ("gpu.attend", "Triton"),
    "reference": ("reference", "Reference"),
    "gluon": ("gpu.attend", "Gluon"),
    "invariant": ("gpu.attend", "Invariant"),
    "flash": ("library_kernels", "FlashAttention2"),
    "flash4": ("library_kernels", "FlashAttention4"),
    "xformers": ("library_kernels", "XFormers"),
}


def _load_own(module: str, name: str) -> Implementation:
    """Import a module next to this one, and return a new object of a class in it."""
    kind: type[Implementation] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind()


# An implementation is loaded when it is chosen, so a missing library affects no other
# implementation. "auto" takes the first one that does not refuse the device. "reference" refuses no
# device, so the implementations after it are used only if they are named.
LOADERS: Final[dict[str, Callable[[], Implementation]]] = {
    name: partial(_load_own, *module_and_name) for name, module_and_name in _OWN.items()
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

    Raises:
        InputError: no implementation has the name, or no permitted one runs on the device.
    """
    if not isinstance(impl, str) or (impl != "auto" and impl not in LOADERS):
        raise InputError(
            f"{arg('impl')} must be auto or one of {', '.join(sorted(LOADERS))}, got {impl!r}"
        )
    reasons = []
    for name in LOADERS if impl == "auto" else [impl]:
        loaded = load(name, device)
        if not isinstance(loaded, str):
            return loaded
        reasons.append(f"{name}: {loaded}")
    raise InputError(f"attention impl {impl!r} cannot run on {device}; {'; '.join(reasons)}")


def load(name: str, device: torch.device) -> Implementation | str:
    """Return the named implementation, or the reason why it cannot run on a device."""
    try:
        implementation = LOADERS[name]()
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return f"{error.name} is not installed"
        return f"cannot be imported: {error}"
    return implementation.refusal(device) or implementation


def check_reads_fp8(impl: str) -> None:
    """Check that a built-in implementation reads keys and values in FP8.

    Raises:
        InputError: the implementation does not read FP8.
    """
    if impl in LOADERS and impl not in _READ_FP8:
        raise InputError(
            f"attention impl {impl!r} does not support an FP8 KV cache; use 'triton' or 'reference'"
        )
