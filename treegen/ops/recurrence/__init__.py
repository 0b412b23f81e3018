"""The gated delta rule and Mamba2, one token at a time, for rows that share states.

The state S of a head is a [k_dim, v_dim] matrix. A token with the key k, the value v, the log gate
g and the strength b changes it:

    S_t = exp(g_t) S_(t-1) + k_t u_t',   u_t = b_t (v_t - exp(g_t) S_(t-1)' k_t)

and reads S_t' q_t. With the sums G_t of log gates since some state S_0 this is

    S_t = exp(G_t) S_0 + sum over i of exp(G_t - G_i) k_i u_i'

So a row need not store S_t. It keeps an update list of its (k_i, u_i, G_i) and reads S_0, which
many rows share, in one matrix product for all of them. A row folds its list into a state of its own
once reading the list takes longer than reading that state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from treegen.ops.kernel_modules import import_kernels
from treegen.ops.recurrence import reference
from treegen.ops.recurrence.types import Convolution as Convolution
from treegen.ops.recurrence.types import DeltaInputs as DeltaInputs
from treegen.ops.recurrence.types import DeltaStates as DeltaStates
from treegen.ops.recurrence.types import RowSlots as RowSlots

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _use_kernels(plain: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the Triton version of a function where its tensors can use it; else the function."""

    @wraps(plain)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        first = next(value for value in args if isinstance(value, DeltaStates | Tensor))
        tensor = first if isinstance(first, Tensor) else first.states
        kernels = import_kernels("treegen.ops.recurrence.gpu") if tensor.is_cuda else None
        if kernels is None:
            return plain(*args, **kwargs)
        on_gpu: Callable[_P, _T] = getattr(kernels, plain.__name__)
        return on_gpu(*args, **kwargs)

    return call


step = _use_kernels(reference.step)
scan = _use_kernels(reference.scan)
fold_update_lists = _use_kernels(reference.fold_update_lists)
convolve = _use_kernels(reference.convolve)
convolve_runs = _use_kernels(reference.convolve_runs)
