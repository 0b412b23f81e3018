"""Share base weights: read them once for several models that differ in their merged adapters."""

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(slots=True)
class _CachedBase:
    key: Hashable = None
    module: PreTrainedModel | None = None


_open: list[_CachedBase] = []


@contextmanager
def share_base_weights() -> Iterator[None]:
    """While open, read the base weights of models with adapters only once. Models share no tensor.

    The host keeps one copy of the weights in 16 or 32 bits.
    """
    _open.append(_CachedBase())
    try:
        yield
    finally:
        _open.pop()


def load_base(key: Hashable, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a separate copy of the module that `read` loads.

    Args:
        key: Identifies the weights. Other weights replace the ones that are kept; None keeps
            nothing.
        read: Loads the module from its checkpoint.
    """
    if not _open or key is None:
        return read()
    held = _open[-1]
    if held.module is None or held.key != key:
        held.module = None  # free its memory before the next one is read
        held.module, held.key = read(), key
    return copy.deepcopy(held.module)
