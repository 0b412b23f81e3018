"""Small proxies for large tensors in compiled code, which keep large sizes out of its graphs.

A graph is compiled for the shapes of its tensors. With page pools and states among them, each
other amount of memory would need another compilation, in the next process too.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

_wholes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by address


def make_proxy(whole: Tensor, dims: int) -> Tensor:
    """Return the first part of a tensor, from which `resolve_proxy` finds the tensor.

    Args:
        whole: The tensor, which must stay referenced elsewhere while the proxy is used.
        dims: Number of leading dimensions that are dropped.
    """
    _wholes[whole.data_ptr()] = whole
    return whole[(0,) * dims]


def resolve_proxy(part: Tensor) -> Tensor:
    """Return the tensor of a proxy."""
    return _wholes[part.data_ptr()]
