"""Weights that are read once for several models that differ in what is merged into them."""

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
    """While open, models with adapters read the weights below them once, and share no tensor.

    The host keeps a copy of the weights in 16 or 32 bits.
    """
    _open.append(_CachedBase())
    try:
        yield
    finally:
        _open.pop()


def load_base(key: Hashable, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a module of one's own of the weights that `read` reads.

    Args:
        key: What they are; other weights replace those that are kept. None: they are not kept.
    """
    if not _open or key is None:
        return read()
    held = _open[-1]
    if held.module is None or held.key != key:
        held.module = None  # its memory is free before the next is read
        held.module, held.key = read(), key
    return copy.deepcopy(held.module)
