"""Changes to compiled layers for which the compiler has no rule.

`torch.topk` is made for long rows. For a router's rows it selects and sorts in two kernels, which
take 26 us per layer for 1,024 rows of 256 scores on an H100, so one small kernel replaces it.

With tensor parallelism on two GPUs, the kernel that adds up the outputs of both also adds the
residual. Otherwise, the sum would be written and read again, by one more kernel per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from treegen.model.parallel.ranks import can_add_residuals

_VIEWS: Final = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_SUMS: Final = (  # and the number of their arguments without a residual
    (torch.ops.treegen.sum_over_ranks.default, 1),
    (torch.ops.treegen.linear_over_ranks.default, 2),
)
MAX_SCORES: Final = 1024
MAX_CHOSEN: Final = 16
"""Maximum scores and choices that `GraphPass` replaces; more are left to torch."""


@torch.library.custom_op("treegen::topk_rows", mutates_args=())
def topk_rows(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest of scores [..., E], largest first, and their indices as int64.

    Ties are broken by the lower index. NaN counts as infinity.
    """
    if scores.device.type == "cuda":
        from treegen.model.linear.row_kernels import largest as on_gpu

        shape = (*scores.shape[:-1], num)
        values = scores.new_empty(shape)
        indices = scores.new_empty(shape, dtype=torch.int64)
        on_gpu(scores, values, indices)
        return values, indices
    order = torch.where(scores.isnan(), torch.inf, scores).sort(
        dim=-1, descending=True, stable=True
    )
    indices = order.indices[..., :num].contiguous()
    return scores.gather(-1, indices), indices


@topk_rows.register_fake
def _(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], num)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@dataclass(frozen=True)
class GraphPass(CustomGraphPass):
    """Replaces `torch.topk` of short rows by `topk_rows`, and adds residuals to sums over ranks.

    Layers with equal passes share compiled graphs.
    """

    adds_residuals: bool
    """Whether sums over ranks add residuals; the same in all ranks, because it changes rounding."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph."""
        for node in graph.nodes:
            if node.target is torch.ops.aten.topk.default and _fits(*node.args, **node.kwargs):
                node.target = torch.ops.treegen.topk_rows.default
                node.args, node.kwargs = node.args[:2], {}
        if self.adds_residuals:
            _add_residuals(graph)

    def uuid(self) -> Any:
        """Return the key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__,), str(self.adds_residuals))


def choose_graph_pass() -> GraphPass:
    """Return the pass for layers that these ranks compile, or this process alone."""
    return GraphPass(can_add_residuals())


def _fits(
    scores: fx.Node, num: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> bool:
    value = scores.meta["val"]
    width = value.shape[-1] if value.dim() else 0
    if isinstance(width, torch.SymInt):
        width = width.node.maybe_as_int()
    return (
        largest
        and dim in (-1, value.dim() - 1)
        and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and isinstance(num, int)
        and width is not None
        and 1 <= num <= min(MAX_CHOSEN, width)
        and width <= MAX_SCORES
    )


def _add_residuals(graph: fx.Graph) -> None:
    """Replace residual + sum over ranks by one call, where nothing else uses the sum."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
            continue
        for viewed, residual in (node.args, node.args[::-1]):
            if (total := _find_sum(viewed)) is None or not _matches(viewed, residual):
                continue
            if order[residual] < order[total]:
                _add_argument(total, residual)
                node.replace_all_uses_with(viewed)
                graph.erase_node(node)
                break


def _add_argument(node: fx.Node, argument: fx.Node) -> None:
    """Append an argument to a call, and to the values from which the compiler takes strides."""
    node.args = (*node.args, argument)
    if (values := node.meta.get("eager_input_vals")) is not None:
        node.meta["eager_input_vals"] = ((*values[0], argument.meta["val"]), values[1])


def _find_sum(node: Any) -> fx.Node | None:
    """Return the sum over ranks that a node is or views; None if something else uses the sum."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if (node.target, len(node.args)) in _SUMS:
            return node
        if node.target not in _VIEWS:
            return None
        node = node.args[0]
    return None


def _matches(node: fx.Node, residual: Any) -> bool:
    """Return whether the values of two nodes are dense tensors of one shape and dtype."""
    value, other = (getattr(operand, "meta", {}).get("val") for operand in (node, residual))
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):  # such as a size
        return False
    return value.shape == other.shape and value.dtype == other.dtype and other.is_contiguous()
