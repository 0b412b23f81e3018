"""Linear layers whose sums have one order, whatever the number of rows.

Libraries choose kernels by the sizes of a product. In 16 bits and for many outputs, cuBLASLt was
measured to sum a row's products in the same order for any number of rows, if it may not split sums.
In float32 the order differs for few rows (a 16-bit model may have a float32 router), and for few
outputs, as in routers and gates, its choice of kernels is unknown.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import inspect
import types
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from treegen.model.linear.experts import GroupedExperts
from treegen.model.linear.fp4 import FourBitExperts, Fp4Linear
from treegen.model.linear.fp8 import Fp8Linear

MAX_KERNEL_OUTPUTS: Final = 512
"""Maximum outputs of a 16-bit layer that uses this module's kernel. All float32 layers use it."""


@torch.library.custom_op("treegen::batch_invariant_linear", mutates_args=())
def batch_invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return input [..., K] times the transpose of weight [N, K], plus bias, summed in one order.

    Args:
        input: Inputs [..., K].
        weight: Weight [N, K].
        bias: Bias [N]; None for none.
    """
    out = input.new_empty((*input.shape[:-1], len(weight)))
    if input.device.type == "cuda":
        from treegen.model.linear.row_kernels import fixed_linear as on_gpu

        on_gpu(input.reshape(-1, input.shape[-1]), weight, bias, out.view(-1, len(weight)))
        return out
    return out.copy_(functional.linear(input, weight, bias))


@batch_invariant_linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def needs_invariant_kernel(weight: Tensor, outputs: int) -> bool:
    """Return whether a product with this many outputs must use `batch_invariant_linear`."""
    return outputs <= MAX_KERNEL_OUTPUTS or weight.dtype == torch.float32


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with `batch_invariant_linear` where its order may vary.

    Args:
        input: Inputs [..., K].
        weight: Weight [N, K].
        bias: Bias [N]; None for none.
    """
    if weight.dim() == 2 and needs_invariant_kernel(weight, weight.shape[0]):
        out: Tensor = batch_invariant_linear(input, weight, bias)
        return out
    return functional.linear(input, weight, bias)


class BatchInvariantLinear(nn.Linear):
    """A linear layer whose sums have one order."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias, [..., out_features]."""
        out: Tensor = batch_invariant_linear(input, self.weight, self.bias)
        return out


class BatchInvariantConv1D(Conv1D):  # type: ignore[misc]
    """A `BatchInvariantLinear` whose weight has inputs first, as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight + bias, [..., outputs]."""
        out: Tensor = batch_invariant_linear(x, self.weight.T, self.bias)
        return out


class BatchInvariantLayers:
    """The layers of a module whose sums may vary in order.

    They compute by `batch_invariant_linear` until `undo`.
    In addition to linear layers these are modules that call `torch.nn.functional.linear`, as
    routers do.
    """

    def __init__(self, module: nn.Module) -> None:
        """Replace the classes of these layers, except experts and those in FP8 or 4 bits.

        Layers in 4 bits then multiply many rows as they do few.
        """
        self._replaced: list[tuple[Any, type]] = []
        self._four_bits: list[Any] = []
        part: Any
        for part in [*module.modules()]:
            kind: Any = type(part)
            if isinstance(part, Fp4Linear | FourBitExperts):
                self._four_bits.append(part)
                part.expands = False
            if isinstance(part, Fp8Linear | Fp4Linear | GroupedExperts):
                continue
            if isinstance(part, nn.Linear):
                if needs_invariant_kernel(part.weight, part.out_features):
                    self._replace_class(part, _make_linear_class(kind))
            elif kind is Conv1D:
                if needs_invariant_kernel(part.weight, part.nf):
                    self._replace_class(part, BatchInvariantConv1D)
            elif _multiplies(kind):
                self._replace_class(part, _make_invariant_class(kind))

    def _replace_class(self, part: Any, kind: type) -> None:
        self._replaced.append((part, type(part)))
        part.__class__ = kind

    def undo(self) -> None:
        """Restore the stock classes."""
        for part, kind in self._replaced:
            part.__class__ = kind
        for part in self._four_bits:
            part.expands = True
        self._replaced.clear()


@cache
def _make_linear_class(kind: Any) -> Any:
    """Return a linear layer's class that multiplies by `batch_invariant_linear`."""
    if kind is nn.Linear:
        return BatchInvariantLinear
    # A call of the forward of `nn.Linear` in the class then reaches BatchInvariantLinear's.
    # Classes that multiply by `product` get the operator directly.
    members = {"__module__": __name__, "product": staticmethod(batch_invariant_linear)}
    return type(kind.__name__, (kind, BatchInvariantLinear), members)


def _multiplies(kind: Any) -> bool:
    """Return whether the forward of a class calls `torch.nn.functional.linear`.

    The class may be decorated, such as to map older names of arguments. Decorated experts are left
    out, because their decorator chooses another way to compute them.
    """
    stock: Any = inspect.unwrap(kind.forward)
    code = getattr(stock, "__code__", None)
    if code is None or "linear" not in code.co_names:
        return False
    if stock is not kind.forward and hasattr(kind, "_apply_gate"):
        return False
    of_module = (stock.__globals__.get(name) for name in code.co_names)
    return "functional" in code.co_names or any(value is functional for value in of_module)


def _make_functional() -> types.ModuleType:
    """Return a copy of `torch.nn.functional` with `linear` of this module."""
    library = types.ModuleType("treegen_functional")
    library.__dict__.update(functional.__dict__)
    library.__dict__["linear"] = linear
    return library


_FUNCTIONAL: Final = _make_functional()


@cache
def _make_invariant_class(kind: Any) -> Any:
    """Return a module's class with `linear` of this module."""
    stock: Any = inspect.unwrap(kind.forward)
    functionals = {k: v for k, v in stock.__globals__.items() if v is functional}
    namespace = {**stock.__globals__, **dict.fromkeys(functionals, _FUNCTIONAL)}
    if "functional" in stock.__code__.co_names:  # nn.functional.linear
        layers = types.ModuleType("treegen_nn")
        layers.__dict__.update({**nn.__dict__, "functional": _FUNCTIONAL})
        namespace |= {k: layers for k, v in stock.__globals__.items() if v is nn}
    # With __name__ the compiler would look these names up in the stock class's module.
    namespace.pop("__name__", None)
    forward = types.FunctionType(
        stock.__code__, namespace, stock.__name__, stock.__defaults__, stock.__closure__
    )
    forward.__kwdefaults__ = stock.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
