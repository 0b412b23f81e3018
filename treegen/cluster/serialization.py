"""Pickles jobs and results, including user code that workers cannot import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from treegen.errors import InputError
from treegen.search.tree.node_registry import pickling_for_other_process

if TYPE_CHECKING:
    from treegen.search.tree.result import SearchResult


def pickle_job(job: object) -> bytes:
    """Pickle a job; raise InputError if it holds objects that cannot be pickled."""
    from ray import cloudpickle

    pickle: Any = cloudpickle  # partly without types
    _send_loose_modules(pickle.register_pickle_by_value)
    try:
        with pickling_for_other_process():
            data: bytes = pickle.dumps(job)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"cannot pickle the function that workers run ({reason:.200}); create clients and "
            "locks inside it"
        ) from error
    return data


def unpickle_job(data: bytes) -> Any:
    """Return the pickled job."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def sendable_result(result: SearchResult) -> SearchResult:
    """Return a result that can be pickled; a value that cannot is replaced by an error."""
    from ray import cloudpickle

    pickle: Any = cloudpickle
    try:
        # A value that unpickles here also unpickles in the caller. The tree has only plain records.
        pickle.loads(pickle.dumps((result.value, result.answers, result.votes)))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reason = (
            f"what it returned cannot be sent by a worker ({reason:.200}); return text or numbers"
        )
        return replace(result, value=None, answers=(), votes={}, error=result.error or reason)
    return result


def _send_loose_modules(register: Callable[[ModuleType], None]) -> None:
    """Register modules that were loaded by path, such as tasks, to be pickled by value.

    Functions of the main program are always pickled by value.
    """
    known: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if not getattr(module, "__file__", None) or getattr(module, "__name__", "") != name:
            continue
        if top not in known:
            known[top] = _is_found(top)
        if not known[top]:
            register(module)


def _is_found(name: str) -> bool:
    """Return whether a module can be imported by name, here and so in a worker."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(name, None) is not None:
            return True
    return False
