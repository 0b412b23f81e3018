"""Import modules of Triton kernels, if the installed Triton can be used."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def import_kernels(name: str) -> ModuleType | None:
    """Return a module of Triton kernels; None if Triton is missing or its import fails.

    Callers then use torch. If a GPU's attention cannot use Triton either, `choose` of
    `treegen.ops.attention.registry` warns and names the error.

    Args:
        name: The full name of the module.
    """
    try:
        return import_module(name)
    except Exception:  # a Triton that does not fit torch or the driver may raise anything
        return None
