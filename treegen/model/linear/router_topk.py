"""Choose experts: find the few largest scores of each row with one small kernel.

`torch.topk` is made for long rows. For a router's rows it selects and sorts in two kernels, which
take 26 us per layer for 1,024 rows of 256 scores on an H100.

Legend: E scores of a row.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

MOST_SCORES: Final = 1024
MOST_CHOSEN: Final = 16
"""Maximum scores and choices that `TopKPass` replaces; more are left to torch."""


@torch.library.custom_op("treegen::topk_rows", mutates_args=())
def topk_rows(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest of scores [..., E], largest first, and their indices as int64.

    Ties are broken by the lower index. NaN counts as infinity.
    """
    if scores.device.type == "cuda":
        from treegen.model.linear.router_topk_kernels import largest as on_gpu

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


class TopKPass(CustomGraphPass):
    """Replaces `torch.topk` of short rows by `largest` in a compiled graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the calls that fit."""
        for node in graph.nodes:
            if node.target is torch.ops.aten.topk.default and _fits(*node.args, **node.kwargs):
                node.target = torch.ops.treegen.topk_rows.default
                node.args, node.kwargs = node.args[:2], {}

    def uuid(self) -> Any:
        """Return the key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__,))


LARGEST: Final = TopKPass()
"""One instance for all layers, so that they share compiled graphs."""


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
        and 1 <= num <= min(MOST_CHOSEN, width)
        and width <= MOST_SCORES
    )
