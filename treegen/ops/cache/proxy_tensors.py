"""Small tensors that stand for large ones in compiled code, whose graph then knows no large size.

A graph is compiled for the shapes of its tensors. With page pools and states among them, every
other amount of memory would be compiled for anew, also by the next process.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

_wholes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by address


def make_proxy(whole: Tensor, dims: int) -> Tensor:
    """The first part of a tensor, without so many of its dimensions, which `resolve_proxy` knows it
    by.

    Args:
        whole: Must be held elsewhere for as long.
    """
    _wholes[whole.data_ptr()] = whole
    return whole[(0,) * dims]


def resolve_proxy(part: Tensor) -> Tensor:
    """The tensor that a part stands for."""
    return _wholes[part.data_ptr()]
