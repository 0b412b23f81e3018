"""Linear layers whose sums have one order, whatever the number of rows.

Libraries choose kernels by the sizes of a product. In 16 bits and for many outputs cuBLASLt was
seen to sum up a row's products in one order at any number of rows, once it may not split sums. In
float32 it sums them up in another order where rows are few; a router may be in float32 in a model
of 16 bits. For few outputs, as of routers and gates, nothing tells which kernels it has.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from treegen.model.linear.experts import GroupedExperts
from treegen.model.linear.fp8 import Fp8Linear

FEW: Final = 512
"""Outputs of a layer in 16 bits at most whose products are taken here. In float32 all are."""


@torch.library.custom_op("treegen::batch_invariant_linear", mutates_args=())
def batch_invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return input [..., K] times the transpose of weight [N, K], plus bias [N]."""
    out = input.new_empty((*input.shape[:-1], len(weight)))
    if input.device.type == "cuda":
        from treegen.model.linear.batch_invariant_kernels import fixed_linear as on_gpu

        on_gpu(input.reshape(-1, input.shape[-1]), weight, bias, out.view(-1, len(weight)))
        return out
    return out.copy_(functional.linear(input, weight, bias))


@batch_invariant_linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def needs_invariant_kernel(weight: Tensor, outputs: int) -> bool:
    """Whether a product with so many outputs is to be taken here."""
    return outputs <= FEW or weight.dtype == torch.float32


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, where it needs an order by `fixed_linear`."""
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
    """The same of a layer whose weight has its inputs first, as GPT-2 has."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight + bias, [..., outputs]."""
        out: Tensor = batch_invariant_linear(x, self.weight.T, self.bias)
        return out


class BatchInvariantLayers:
    """The layers of a module that need an order, which compute by `fixed_linear` until `undo`.

    Beside linear layers these are modules that call `torch.nn.functional.linear`, as routers do.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find them. Fused experts and layers in FP8 have ways of their own."""
        self._were: list[tuple[Any, type]] = []
        part: Any
        for part in [*module.modules()]:
            if isinstance(part, Fp8Linear | GroupedExperts):
                continue
            if isinstance(part, nn.Linear):
                if needs_invariant_kernel(part.weight, part.out_features):
                    self._put(part, _make_linear_class(type(part)))
            elif type(part) is Conv1D:
                if needs_invariant_kernel(part.weight, part.nf):
                    self._put(part, BatchInvariantConv1D)
            elif _multiplies(type(part)):
                self._put(part, _make_invariant_class(type(part)))

    def _put(self, part: Any, kind: type) -> None:
        self._were.append((part, type(part)))
        part.__class__ = kind

    def undo(self) -> None:
        """Let them compute as they did."""
        for part, kind in self._were:
            part.__class__ = kind
        self._were.clear()


def _make_linear_class(kind: type) -> Any:
    """The class of a linear layer, but by `fixed_linear`; always the same one."""
    if kind is nn.Linear:
        return BatchInvariantLinear
    if kind not in _kinds:
        # What the class itself calls the forward of `nn.Linear` is the second one's then. What it
        # calls `product` is this.
        known = {"__module__": __name__, "product": staticmethod(batch_invariant_linear)}
        _kinds[kind] = type(kind.__name__, (kind, BatchInvariantLinear), known)
    return _kinds[kind]


def _multiplies(kind: Any) -> bool:
    """Whether the forward of a class calls `linear` of torch itself.

    Decorators, such as those that map older names of arguments, do not hide that. Decorated experts
    are left out: their decorator chooses another way to compute them.
    """
    stock: Any = inspect.unwrap(kind.forward)
    code = getattr(stock, "__code__", None)
    if code is None or "linear" not in code.co_names:
        return False
    if stock is not kind.forward and hasattr(kind, "_apply_gate"):
        return False
    of_module = (stock.__globals__.get(name) for name in code.co_names)
    return "functional" in code.co_names or any(each is functional for each in of_module)


def _library() -> types.ModuleType:
    """`torch.nn.functional`, but with `linear` of this module."""
    shown = types.ModuleType("treegen_functional")
    shown.__dict__.update(functional.__dict__)
    shown.__dict__["linear"] = linear
    return shown


_FUNCTIONAL: Final = _library()
_kinds: dict[type, Any] = {}


def _make_invariant_class(kind: Any) -> Any:
    """The class of a module, but by `linear` of this module; always the same one."""
    if kind not in _kinds:
        stock: Any = inspect.unwrap(kind.forward)
        names = {k: v for k, v in stock.__globals__.items() if v is functional}
        known = {**stock.__globals__, **dict.fromkeys(names, _FUNCTIONAL)}
        if "functional" in stock.__code__.co_names:  # nn.functional.linear
            layers = types.ModuleType("treegen_nn")
            layers.__dict__.update({**nn.__dict__, "functional": _FUNCTIONAL})
            known |= {k: layers for k, v in stock.__globals__.items() if v is nn}
        # By its name the compiler would look for these names where the stock class is.
        known.pop("__name__", None)
        forward = types.FunctionType(
            stock.__code__, known, stock.__name__, stock.__defaults__, stock.__closure__
        )
        forward.__kwdefaults__ = stock.__kwdefaults__
        _kinds[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
    return _kinds[kind]
