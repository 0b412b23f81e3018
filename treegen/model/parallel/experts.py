"""Whole experts on each rank (expert parallelism): those of a layer are dealt out.

Each rank has the router, and so knows what all rows chose. It computes what fell to its own
experts, and the ranks add up what theirs put out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.model.parallel.ranks import sum_over_ranks

# T rows, K chosen experts, E experts

WHOLE_EXPERTS: Final = "ep_dispatch_experts"
"""The style of a module with whole experts."""
ONE_OF_EXPERTS: Final = "grouped_gemm"
"""The style of a parameter of all experts [E, ...], of which a rank has some."""


def with_whole_experts(
    plan: Mapping[str, str], ep_plan: Mapping[str, str], can_cut: Collection[str]
) -> dict[str, str]:
    """A plan with whole experts where the plan cannot cut experts themselves.

    Args:
        ep_plan: Of expert parallelism.
        can_cut: Names of modules whose experts the plan can cut.
    """
    found = dict(plan)
    experts = {key: key.rpartition(".")[0] for key, way in ep_plan.items() if way == ONE_OF_EXPERTS}
    for key, name in experts.items():
        if name not in can_cut:
            found[key], found[name] = ONE_OF_EXPERTS, WHOLE_EXPERTS
    return found


def deal_experts(part: nn.Module, rank: int, count: int) -> None:
    """Have a module compute what falls to its rank's `count` experts, and add up over ranks."""
    part.num_experts = count  # type: ignore[assignment]
    # A loop over experts knows no number for "none of these". Grouped products skip such rows.
    is_loop = not hasattr(part, "has_gate") or part.config._experts_implementation == "eager"  # type: ignore[union-attr]
    none = 0 if is_loop else count
    part._is_expert_parallel = True  # type: ignore[assignment]

    def mine(part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(given) != 3:
            raise RuntimeError("its experts are not given states, choices and weights")
        states_TD, chosen_TK, weights_TK = given
        is_other = chosen_TK // count != rank
        local_TK = torch.where(is_other, none, chosen_TK % count)
        return states_TD, local_TK, weights_TK.masked_fill(is_other, 0.0)

    part.register_forward_pre_hook(mine)
    part.register_forward_hook(sum_output)


def sum_output(part: nn.Module, inputs: object, output: Any) -> Any:
    """Add up over the ranks what a mixture of experts puts out."""
    if isinstance(output, tuple):
        return (sum_over_ranks(output[0].contiguous()), *output[1:])
    return sum_over_ranks(output.contiguous())


def divided_identity(size: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """A hook of an expert that each rank computes whole: its part of what is summed."""
    return lambda part, inputs, output: output / size
