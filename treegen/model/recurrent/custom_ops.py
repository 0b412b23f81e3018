"""The operators of recurrent layers as custom operators, which the compiler treats as opaque.

They get the states of the pass from a context variable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from treegen.model.recurrent.operators import PLAIN, Operators
from treegen.ops.cache.proxy_tensors import resolve_proxy

# T tokens, C channels


def _opaque(
    plain: Callable[..., Tensor], changes: tuple[str, ...], shape: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return an operator that the compiler treats as opaque.

    Args:
        plain: The operator's implementation.
        changes: Names of the arguments that it writes into. It is called with proxies for these.
        shape: Returns an output without values; the fake implementation.
    """
    name = plain.__name__
    places = [list(inspect.signature(plain).parameters).index(argument) for argument in changes]

    @functools.wraps(plain)
    def on_wholes(*given: Any) -> Tensor:
        known = list(given)
        for place in places:
            known[place] = resolve_proxy(known[place])
        return plain(*known)

    # The compiler does not see the tensors that it writes into, so it mutates no argument.
    torch.library.custom_op(f"treegen::{name}", on_wholes, mutates_args=()).register_fake(shape)
    operator: Callable[..., Tensor] = getattr(torch.ops.treegen, name)
    return operator


def _gated_delta(
    mixed_TC: Tensor,
    b: Tensor,
    a: Tensor,
    conv: Tensor,
    a_log: Tensor,
    bias: Tensor,
    windows: Tensor,
    states: Tensor,
    *options: Any,
) -> Tensor:
    return mixed_TC.new_empty(mixed_TC.shape[0], states.shape[0], states.shape[2])


def _mamba2(
    mixed_TC: Tensor,
    dt: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    bias: Tensor,
    skip: Tensor,
    windows: Tensor,
    states: Tensor,
    *options: Any,
) -> Tensor:
    return mixed_TC.new_empty(mixed_TC.shape[0], states.shape[0], states.shape[1])


def _short_conv(x_TC: Tensor, *options: Any) -> Tensor:
    return x_TC.new_empty(x_TC.shape)


OPERATORS: Final = Operators(
    _opaque(PLAIN.gated_delta, ("windows", "states"), _gated_delta),
    _opaque(PLAIN.mamba2, ("windows", "states"), _mamba2),
    _opaque(PLAIN.short_conv, ("windows",), _short_conv),
)
