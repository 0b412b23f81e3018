"""Fused experts: all experts of a layer are stored in two tensors, and each row uses a few of them.

transformers sorts pairs of a token and an expert by expert, gathers their rows, multiplies each
expert's rows by its matrices, scatters the results and sums them, in about twenty kernels. On a GPU
this module needs six.

Legend: T tokens, X experts of a token, S = T X pairs, E experts, N outputs, K inputs, B blocks,
D width of a pair's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treegen.model.latent import make_subclass
from treegen.model.linear.blocks import count_max_blocks, rows_of_block


class FusedExperts(NamedTuple):
    """Experts of one layer: their module, and the names of its two tensors."""

    module: Any
    up: str
    down: str

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of its two tensors, in order of use."""
        return self.up, self.down


def fused_experts(module: nn.Module) -> Iterator[tuple[str, FusedExperts]]:
    """Yield the name and experts of each part of a module that stores experts in two tensors.

    Experts with a norm behind each expert are left to transformers.
    """
    for name, part in module.named_modules():
        has_gate = getattr(part, "has_gate", None)
        if has_gate is None or getattr(part, "has_post_expert_norm", False):
            continue
        experts = FusedExperts(part, "gate_up_proj" if has_gate else "up_proj", "down_proj")
        weights = [part._parameters.get(tensor_name) for tensor_name in experts.tensors]
        if all(weight is not None and weight.dim() == 3 for weight in weights):
            yield name, experts


Routes = tuple[Tensor, Tensor, int]
"""The sorted pairs and their blocks, from `group_by_expert`, and the consecutive pairs that share a
row."""


class GroupedExperts(nn.Module):
    """Experts whose pairs are computed expert by expert, mixed into each stock class."""

    treegen_up: str
    """The name of the first tensor, [E, N, K], or [E, K, N] in a transposed class."""
    treegen_down: str
    """The name of the second tensor, likewise."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts compute from it.

        Args:
            hidden_states: Inputs [T, K].
            top_k_index: The experts of each token [T, X].
            top_k_weights: Their weights [T, X].

        Returns:
            Outputs [T, K].
        """
        stock: Any = self
        routes = group_by_expert(top_k_index, stock.num_experts)
        num_chosen, dtype = top_k_index.shape[1], hidden_states.dtype
        up = self._product(self.treegen_up, hidden_states, (*routes, num_chosen), dtype)
        out = self._product(self.treegen_down, self._act(up), (*routes, 1), dtype)
        total: Tensor = weighted_sum(out, top_k_index, top_k_weights, stock.num_experts)
        return total

    def _act(self, up: Tensor) -> Tensor:
        stock: Any = self
        inner: Tensor = stock._apply_gate(up) if stock.has_gate else stock.act_fn(up)
        return inner

    def _product(self, name: str, rows: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
        stock: Any = self
        bias = getattr(self, f"{name}_bias") if stock.has_bias else None
        weight, is_transposed = getattr(self, name), stock.is_transposed
        out: Tensor = grouped_product(rows, None, weight, None, bias, *routes, is_transposed, dtype)
        return out


def convert_experts(experts: FusedExperts, kind: type[nn.Module]) -> None:
    """Turn experts into a subclass `kind` of `GroupedExperts`."""
    both: tuple[Any, Any] = kind, type(experts.module)
    experts.module.__class__ = make_subclass(*both)
    experts.module.treegen_up, experts.module.treegen_down = experts.tensors


class GroupedLayers:
    """The experts of a module, computed by `GroupedExperts` until `undo`."""

    def __init__(self, module: nn.Module) -> None:
        """Convert them. FP8 experts are already of a subclass."""
        self._replaced: list[tuple[Any, type]] = []
        for _, experts in [*fused_experts(module)]:
            if not isinstance(experts.module, GroupedExperts):
                self._replaced.append((experts.module, type(experts.module)))
                convert_experts(experts, GroupedExperts)

    def undo(self) -> None:
        """Make the experts compute as in transformers again."""
        for part, kind in self._replaced:
            part.__class__ = kind
            del part.treegen_up, part.treegen_down
        self._replaced.clear()


@torch.library.custom_op("treegen::group_by_expert", mutates_args=())
def group_by_expert(chosen_TX: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert and divide them into blocks.

    Args:
        chosen_TX: The experts of each token [T, X]. Pairs whose expert is not below `experts`
            belong to no block; entries of the order after the last block are undefined.
        experts: The number of experts.

    Returns:
        The pairs sorted by expert, int32 [S], and their blocks, int32 [3, B]. A block has its
            expert, or -1 if unused, and the begin and end of its pairs in the sorted order.
    """
    num_pairs, device = chosen_TX.numel(), chosen_TX.device
    blocks_3B = torch.empty(
        (3, count_max_blocks(num_pairs, experts)), dtype=torch.int32, device=device
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
    shape = 3, count_max_blocks(num_pairs, experts)
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
    pairs_per_row: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product of each pair's row and its expert's matrix, [S, N].

    Pairs in no block are left without values.

    Args:
        rows: Inputs [S / pairs_per_row, K]; each row belongs to `pairs_per_row` consecutive pairs.
        scale_M: The scales of FP8 rows, float32 [S / pairs_per_row]; None for other rows.
        weight: Weights [E, N, K], or [E, K, N] if transposed.
        scale: The scales of FP8 weights, float32 [E, N]; None for weights that are not FP8.
        bias_EN: Biases [E, N]; None for none.
        order_S: The sorted pairs, from `group_by_expert`.
        blocks_3B: Their blocks, from `group_by_expert`.
        pairs_per_row: Consecutive pairs that share a row.
        transposed: Whether weights have inputs first.
        dtype: The type of the result.
    """
    outputs = weight.shape[2 if transposed else 1]
    out = rows.new_empty((len(order_S), outputs), dtype=dtype)
    if rows.device.type == "cuda":
        from treegen.model.linear.expert_kernels import grouped_product as on_gpu

        routes = order_S, blocks_3B, pairs_per_row
        on_gpu(rows, scale_M, weight, scale, bias_EN, *routes, transposed, out)
        return out
    for expert, begin, end in blocks_3B.T.tolist():
        if expert < 0:
            break
        pairs = order_S[begin:end]
        at = pairs // pairs_per_row
        matrix = weight[expert].T if transposed else weight[expert]
        product = linear(rows[at].float(), matrix.float())
        if scale_M is not None and scale is not None:
            product *= scale_M[at, None] * scale[expert]
        out[pairs] = (product if bias_EN is None else product + bias_EN[expert].float()).to(dtype)
    return out


@grouped_product.register_fake
def _(*arguments: Any) -> Tensor:
    rows, _, weight, _, _, order_S, _, _, transposed, dtype = arguments
    empty: Tensor = rows.new_empty(
        (order_S.shape[0], weight.shape[2 if transposed else 1]), dtype=dtype
    )
    return empty


@torch.library.custom_op("treegen::weighted_sum", mutates_args=())
def weighted_sum(pairs_SD: Tensor, chosen_TX: Tensor, weights_TX: Tensor, experts: int) -> Tensor:
    """Return the sums [T, D] of the outputs of each token's pairs, each times its weight.

    Args:
        pairs_SD: Outputs of all pairs [S, D].
        chosen_TX: The experts of each token [T, X]. Pairs whose expert is not below `experts` count
            as zero.
        weights_TX: Their weights [T, X].
        experts: The number of experts.
    """
    tokens, num_chosen = chosen_TX.shape
    out = pairs_SD.new_empty((tokens, pairs_SD.shape[1]))
    if pairs_SD.device.type == "cuda":
        from treegen.model.linear.expert_kernels import weighted_sum as on_gpu

        on_gpu(pairs_SD, chosen_TX, weights_TX, experts, out)
        return out
    weighted_TXD = pairs_SD.view(tokens, num_chosen, -1).float() * weights_TX[..., None].float()
    weighted_TXD = weighted_TXD.masked_fill((chosen_TX >= experts)[..., None], 0.0)
    return out.copy_(weighted_TXD.sum(1))


@weighted_sum.register_fake
def _(pairs_SD: Tensor, chosen_TX: Tensor, weights_TX: Tensor, experts: int) -> Tensor:
    return pairs_SD.new_empty((chosen_TX.shape[0], pairs_SD.shape[1]))
