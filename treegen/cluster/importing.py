"""Code of the user's that workers cannot import is sent to them as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType


def send_loose_modules() -> None:
    """Have what files define that were loaded by path, such as tasks, sent by value.

    Functions of the main program are sent so in any case.
    """
    from ray import cloudpickle

    register: Callable[[ModuleType], None] = cloudpickle.register_pickle_by_value
    for module in list(sys.modules.values()):
        if _is_loose(module):
            register(module)


def _is_loose(module: ModuleType) -> bool:
    """Whether a module came from a file that its name does not lead to."""
    name = getattr(module, "__name__", "")
    if not getattr(module, "__file__", None) or sys.modules.get(name) is not module:
        return False
    try:
        return PathFinder.find_spec(name.partition(".")[0]) is None
    except (ImportError, ValueError):
        return False
