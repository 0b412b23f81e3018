"""Expert parallelism: each rank has some whole experts of a layer.

Each rank has the router and therefore knows the choices of all rows. It computes the rows of its
own experts, and the ranks sum their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.model.parallel.ranks import sum_over_ranks

# T rows, K chosen experts, E experts, D width of a row

WHOLE_EXPERTS: Final = "ep_dispatch_experts"
"""The plan style of a module with whole experts."""
ONE_OF_EXPERTS: Final = "grouped_gemm"
"""The plan style of a parameter of all experts [E, ...], of which a rank keeps some."""


def with_whole_experts(
    plan: Mapping[str, str], ep_plan: Mapping[str, str], can_cut: Collection[str]
) -> dict[str, str]:
    """Return a plan that uses whole experts where the plan cannot cut the experts themselves.

    Args:
        plan: The tensor-parallel plan: styles by names of modules and parameters.
        ep_plan: The plan of expert parallelism, likewise.
        can_cut: Names of modules whose experts the plan can cut.
    """
    combined = dict(plan)
    experts = {key: key.rpartition(".")[0] for key, way in ep_plan.items() if way == ONE_OF_EXPERTS}
    for key, name in experts.items():
        if name not in can_cut:
            combined[key], combined[name] = ONE_OF_EXPERTS, WHOLE_EXPERTS
    return combined


def deal_experts(part: nn.Module, rank: int, count: int) -> None:
    """Make a module compute only the rows of its rank's experts, and sum the outputs over ranks.

    Args:
        part: The experts module, whose parameters already hold only this rank's experts. It is
            changed.
        rank: The rank.
        count: The number of experts per rank.
    """
    part.num_experts = count  # type: ignore[assignment]
    # A loop over experts has no index for "none of these". Grouped products skip index `count`.
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
    """Sum the output of a mixture of experts over the ranks; a forward hook.

    Args:
        part: The module; unused.
        inputs: Its inputs; unused.
        output: Its output, or a tuple that starts with it.
    """
    if isinstance(output, tuple):
        return (sum_over_ranks(output[0].contiguous()), *output[1:])
    return sum_over_ranks(output.contiguous())


def divided_identity(size: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """Return a forward hook that divides an expert's output by `size`, the number of ranks.

    It is for experts that every rank computes.
    """
    return lambda part, inputs, output: output / size
