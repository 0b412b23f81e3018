"""Fused experts: all experts of a layer lie in two tensors, and each row meets a few of them.

transformers sorts pairs of a token and an expert by expert, gathers their rows, multiplies each
expert's rows with its matrices, scatters the results and adds them up, in some twenty kernels. On a
GPU this does it in six.

Legend: T tokens, X experts of a token, S = T X pairs, E experts, N outputs, K inputs, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treegen.model.linear.blocks import room_for_blocks, rows_of_block


class FusedExperts(NamedTuple):
    """Experts of one layer: their module, and the names of its two tensors."""

    module: Any
    up: str
    down: str

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of its two tensors, in the order in which they are used."""
        return self.up, self.down


def fused_experts(module: nn.Module) -> Iterator[tuple[str, FusedExperts]]:
    """Yield the experts of a module that lie in two tensors, each with its name.

    Those with a norm behind each expert are left to transformers.
    """
    for name, part in module.named_modules():
        has_gate = getattr(part, "has_gate", None)
        if has_gate is None or getattr(part, "has_post_expert_norm", False):
            continue
        found = FusedExperts(part, "gate_up_proj" if has_gate else "up_proj", "down_proj")
        weights = [part._parameters.get(each) for each in found.tensors]
        if all(weight is not None and weight.dim() == 3 for weight in weights):
            yield name, found


class GroupedExperts(nn.Module):
    """Experts whose pairs are computed by expert. Each class of experts has a subclass of both.

    treegen_up, treegen_down: names of the tensors, [E, N, K], or [E, K, N] of a transposed class.
    """

    treegen_up: str
    treegen_down: str

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, K] of what each token's experts [T, X] make of it [T, K]."""
        stock: Any = self
        routes = group_by_expert(top_k_index, stock.num_experts)
        each, dtype = top_k_index.shape[1], hidden_states.dtype
        up = self._product(self.treegen_up, hidden_states, routes, each, dtype)
        out = self._product(self.treegen_down, self._act(up), routes, 1, dtype)
        total: Tensor = weighted_sum(out, top_k_index, top_k_weights, stock.num_experts)
        return total

    def _act(self, up: Tensor) -> Tensor:
        stock: Any = self
        inner: Tensor = stock._apply_gate(up) if stock.has_gate else stock.act_fn(up)
        return inner

    def _product(
        self, name: str, rows: Tensor, routes: tuple[Tensor, Tensor], each: int, dtype: torch.dtype
    ) -> Tensor:
        stock: Any = self
        bias = getattr(self, f"{name}_bias") if stock.has_bias else None
        out: Tensor = grouped_product(
            rows,
            None,
            getattr(self, name),
            None,
            bias,
            *routes,
            each,
            stock.is_transposed,
            dtype,
        )
        return out


@cache
def _kind(kind: type[nn.Module], stock: type[nn.Module]) -> Any:
    """The subclass of both; always the same one."""
    name = f"{kind.__name__}{stock.__name__}"
    return type(name, (kind, stock), {"__module__": __name__})


def convert_experts(found: FusedExperts, kind: type[nn.Module]) -> None:
    """Turn experts into a kind of `GroupedExperts`."""
    both: tuple[Any, Any] = kind, type(found.module)
    found.module.__class__ = _kind(*both)
    found.module.treegen_up, found.module.treegen_down = found.tensors


class GroupedLayers:
    """The experts of a module that compute by `GroupedExperts`, until `undo`."""

    def __init__(self, module: nn.Module) -> None:
        """Find them. Those in FP8 have their own way."""
        self._were: list[tuple[Any, type]] = []
        for _, found in [*fused_experts(module)]:
            if not isinstance(found.module, GroupedExperts):
                self._were.append((found.module, type(found.module)))
                convert_experts(found, GroupedExperts)

    def undo(self) -> None:
        """Let them compute as transformers does."""
        for part, kind in self._were:
            part.__class__ = kind
            del part.treegen_up, part.treegen_down
        self._were.clear()


@torch.library.custom_op("treegen::group_by_expert", mutates_args=())
def group_by_expert(chosen_TX: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs by expert, int32 [S], and their blocks, int32 [3, B].

    A block has an expert, or -1, and where its pairs begin and end among those by expert. Pairs
    whose expert is not below `experts` are left out; their places are at the end.
    """
    num_pairs, device = chosen_TX.numel(), chosen_TX.device
    blocks_3B = torch.empty(
        (3, room_for_blocks(num_pairs, experts)), dtype=torch.int32, device=device
    )
    order_S = torch.empty(num_pairs, dtype=torch.int32, device=device)
    if device.type == "cuda":
        from treegen.model.linear.expert_kernels import sort_pairs

        sort_pairs(chosen_TX, experts, order_S, blocks_3B)
        return order_S, blocks_3B
    order_S.copy_(chosen_TX.reshape(-1).argsort(stable=True))
    count_E = torch.bincount(chosen_TX.reshape(-1), minlength=experts)[:experts]
    rows, at, end = rows_of_block(num_pairs, experts), 0, 0
    blocks_3B[0] = -1
    for expert, count in enumerate(count_E.tolist()):
        for begin in range(end, end + count, rows):
            block = expert, begin, min(begin + rows, end + count)
            blocks_3B[:, at] = torch.tensor(block, dtype=torch.int32)
            at += 1
        end += count
    return order_S, blocks_3B


@group_by_expert.register_fake
def _(chosen_TX: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    num_pairs = chosen_TX.shape[0] * chosen_TX.shape[1]
    order_S = chosen_TX.new_empty(num_pairs, dtype=torch.int32)
    shape = 3, room_for_blocks(num_pairs, experts)
    return order_S, chosen_TX.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("treegen::grouped_product", mutates_args=())
def grouped_product(
    rows: Tensor,
    scale_M: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias_EN: Tensor | None,
    order_S: Tensor,
    blocks_3B: Tensor,
    each: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each pair's expert makes of its row, [S, N]; nothing for pairs left out.

    Args:
        rows: [S / each, K]; each of them belongs to so many pairs, which follow one another.
        scale_M: By which rows are multiplied, if they are in FP8.
        weight: [E, N, K], or [E, K, N] if transposed.
        scale: Float32 [E, N], by which outputs are multiplied, if weights are in FP8.
        bias_EN: What is added to outputs.
        order_S: As from `routed`.
        blocks_3B: As from `routed`.
    """
    outputs = weight.shape[2 if transposed else 1]
    out = rows.new_empty((len(order_S), outputs), dtype=dtype)
    if rows.device.type == "cuda":
        from treegen.model.linear.expert_kernels import grouped_product as on_gpu

        on_gpu(rows, scale_M, weight, scale, bias_EN, order_S, blocks_3B, each, transposed, out)
        return out
    for expert, begin, end in blocks_3B.T.tolist():
        if expert < 0:
            break
        pairs = order_S[begin:end]
        at = pairs // each
        matrix = weight[expert].T if transposed else weight[expert]
        made = linear(rows[at].float(), matrix.float())
        if scale_M is not None and scale is not None:
            made *= scale_M[at, None] * scale[expert]
        out[pairs] = (made if bias_EN is None else made + bias_EN[expert].float()).to(dtype)
    return out


@grouped_product.register_fake
def _(
    rows: Tensor,
    scale_M: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias_EN: Tensor | None,
    order_S: Tensor,
    blocks_3B: Tensor,
    each: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    outputs = weight.shape[2 if transposed else 1]
    return rows.new_empty((order_S.shape[0], outputs), dtype=dtype)


@torch.library.custom_op("treegen::weighted_sum", mutates_args=())
def weighted_sum(pairs_SD: Tensor, chosen_TX: Tensor, weights_TX: Tensor, experts: int) -> Tensor:
    """Return the sums [T, D] of what a token's pairs made, each times its weight.

    Pairs whose expert is not below `experts` count as zero.
    """
    tokens, each = chosen_TX.shape
    out = pairs_SD.new_empty((tokens, pairs_SD.shape[1]))
    if pairs_SD.device.type == "cuda":
        from treegen.model.linear.expert_kernels import weighted_sum as on_gpu

        on_gpu(pairs_SD, chosen_TX, weights_TX, experts, out)
        return out
    made_TXD = pairs_SD.view(tokens, each, -1).float() * weights_TX[..., None].float()
    made_TXD = made_TXD.masked_fill((chosen_TX >= experts)[..., None], 0.0)
    return out.copy_(made_TXD.sum(1))


@weighted_sum.register_fake
def _(pairs_SD: Tensor, chosen_TX: Tensor, weights_TX: Tensor, experts: int) -> Tensor:
    return pairs_SD.new_empty((chosen_TX.shape[0], pairs_SD.shape[1]))
