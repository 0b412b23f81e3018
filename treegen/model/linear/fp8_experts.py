"""Fused experts in FP8: all experts of a layer lie in two tensors, with a scale for each output.

transformers sorts pairs of a token and an expert by expert, and multiplies each expert's rows with
its matrices at once. So does this, with rows and matrices in FP8.

Legend: T tokens, S pairs of a token and one of its experts, E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from treegen.model.linear.fp8 import MULTIPLE, in_pieces, quantize_linears, quantized
from treegen.model.linear.gated import silu_quantized

_PLAIN: Final = {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False}


class Fused(NamedTuple):
    """Experts of one layer: their module, and the names of its two tensors."""

    module: Any
    up: str
    down: str


class Fp8Experts(nn.Module):
    """Experts whose tensors are in FP8. Each class of experts has a subclass of both.

    treegen_up, treegen_down: names of the tensors [E, N, K]; NAME_scale are their scales [E, N].
    treegen_silu: whether the gate is silu(first half) * second half.
    rounds_inputs: whether inputs are in FP8 too.
    """

    treegen_up: str
    treegen_down: str
    treegen_silu: bool
    rounds_inputs = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of what each token's experts [T, X] make of it [T, D]."""
        if not self.rounds_inputs:
            return self._expanded(hidden_states, top_k_index, top_k_weights)
        stock: Any = self
        hidden, (tokens, each) = hidden_states, top_k_index.shape
        experts_S, order_S = top_k_index.reshape(-1).sort(stable=True)
        index_E = torch.arange(stock.num_experts, device=hidden.device)
        ends_E = torch.searchsorted(experts_S, index_E, right=True, out_int32=True)
        rows, scale_M = quantized(hidden)
        up = self._product(self.treegen_up, rows, scale_M, order_S, ends_E, each, hidden.dtype)
        if self.treegen_silu:
            rows, scale_M = silu_quantized(up)
        else:
            rows, scale_M = quantized(stock._apply_gate(up) if stock.has_gate else stock.act_fn(up))
        out = self._product(self.treegen_down, rows, scale_M, order_S, ends_E, 1, hidden.dtype)
        total_TD = (out.view(tokens, each, -1) * top_k_weights[..., None]).sum(1)
        return total_TD.to(hidden.dtype)

    def _product(self, name: str, *given: Any) -> Tensor:
        rows, scale_M, *others = given
        weight, scale_EN = getattr(self, name), getattr(self, f"{name}_scale")
        out: Tensor = grouped_product(rows, scale_M, weight, scale_EN, *others)
        return out

    def _expanded(self, hidden: Tensor, *routes: Tensor) -> Tensor:
        """What the stock class makes of inputs that are not rounded."""
        parts = {name: self._parameters[name] for name in (self.treegen_up, self.treegen_down)}
        try:
            for name, part in parts.items():
                scale_EN = getattr(self, f"{name}_scale")
                wide = (cast(Tensor, part).float() * scale_EN[..., None]).to(hidden.dtype)
                self._parameters[name] = nn.Parameter(wide, requires_grad=False)
            return cast(Tensor, super().forward(hidden, *routes))
        finally:
            self._parameters.update(parts)


_kinds: dict[type, Any] = {}


def fused_experts(module: nn.Module) -> Iterator[tuple[str, Fused]]:
    """Yield the experts of a module that may run in FP8, each with its name.

    Those with biases, transposed or with sizes that are no multiples of 16 may not.
    """
    for name, part in module.named_modules():
        has_gate = getattr(part, "has_gate", None)
        if has_gate is None or isinstance(part, Fp8Experts):
            continue
        if any(getattr(part, flag, usual) != usual for flag, usual in _PLAIN.items()):
            continue
        found = Fused(part, "gate_up_proj" if has_gate else "up_proj", "down_proj")
        weights = [part._parameters.get(each) for each in found[1:]]
        if all(w is not None and w.dim() == 3 and not _odd(w) for w in weights):
            yield name, found


def _odd(weight: Tensor) -> bool:
    return any(size % MULTIPLE for size in weight.shape[1:])


def quantize_matrices(module: nn.Module, device: torch.device) -> None:
    """Turn linear layers and fused experts of a module into FP8 on a device."""
    quantize_linears(module, device)
    for _, found in [*fused_experts(module)]:
        sides = []
        for name in found[1:]:
            weight = getattr(found.module, name).data
            rounded, scale_R = in_pieces(weight.flatten(0, 1), device)
            sides.append((rounded.view(weight.shape), scale_R.view(weight.shape[:2])))
        install_experts(found, *sides)


def install_experts(found: Fused, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
    """Turn experts into FP8, with tensors [E, N, K] and their scales [E, N] in float32."""
    part = found.module
    is_silu = _has_silu(part, found)
    for name, (weight, scale_EN) in zip(found[1:], (up, down), strict=True):
        setattr(part, name, nn.Parameter(weight, requires_grad=False))
        part.register_buffer(f"{name}_scale", scale_EN, persistent=False)
    kind = type(part)
    if kind not in _kinds:
        _kinds[kind] = type(kind.__name__, (Fp8Experts, kind), {"__module__": __name__})
    part.__class__ = _kinds[kind]
    part.treegen_up, part.treegen_down = found[1:]
    part.treegen_silu = is_silu


def _has_silu(part: Any, found: Fused) -> bool:
    """Whether experts gate by silu(first half) * second half, told by what they make of numbers."""
    if not part.has_gate:
        return False
    weight = getattr(part, found.up)
    x = torch.linspace(-20, 20, 2 * weight.shape[1], device=weight.device).view(2, -1)
    first, second = x.chunk(2, dim=-1)
    return torch.equal(part._apply_gate(x), silu(first) * second)


@torch.library.custom_op("treegen::grouped_product", mutates_args=())
def grouped_product(
    rows: Tensor,
    scale_M: Tensor,
    weight: Tensor,
    scale_EN: Tensor,
    order_S: Tensor,
    ends_E: Tensor,
    each: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each pair's expert makes of its row, [S, N].

    rows: [S / each, K] in FP8; each of them belongs to so many pairs, which follow one another.
    scale_M: by which rows are multiplied.
    weight: [E, N, K] in FP8. scale_EN: by which outputs are multiplied.
    order_S: the pairs by expert. ends_E: int32, where those of each expert end in it.
    """
    out = rows.new_empty((len(order_S), weight.shape[1]), dtype=dtype)
    if rows.device.type == "cuda":
        from treegen.model.linear.fp8_kernels import grouped_product as on_gpu

        on_gpu(rows, scale_M, weight, scale_EN, order_S, ends_E, each, out)
        return out
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        pairs = order_S[begin:end]
        if len(pairs):
            at = pairs // each
            made = linear(rows[at].float(), weight[expert].float())
            out[pairs] = (made * scale_M[at, None] * scale_EN[expert]).to(dtype)
        begin = end
    return out


@grouped_product.register_fake
def _(
    rows: Tensor, scale_M: Tensor, weight: Tensor, scale_EN: Tensor, order_S: Tensor,
    ends_E: Tensor, each: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return rows.new_empty((order_S.shape[0], weight.shape[1]), dtype=dtype)
