"""What ranks are told to load in tests: what they exchange, and models made in another way."""

from typing import Any

import torch

from treegen.model.linear.batch_invariant import BatchInvariantLayers
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.parallel.ranks import Ranks, sum_over_ranks


def gather_one_column(*, device: torch.device, ranks: Ranks) -> Any:
    """Column r is of rank r."""
    return ranks.all_gather(torch.arange(6.0, device=device).view(2, 3, 1) + 10 * ranks.rank)


def load_in_order(path: str, *, device: torch.device, ranks: Ranks) -> Model:
    """A part of a model whose products are summed in one order, as on a GPU."""
    model = load_model(path, device=device, ranks=ranks)
    BatchInvariantLayers(model.module)
    return model


def tensors_of(size: int, numel: int, dtype: torch.dtype, turn: int = 0) -> list[torch.Tensor]:
    """What each rank adds."""
    seeds = (torch.Generator().manual_seed(100 * turn + rank) for rank in range(size))
    return [(4 * torch.randn(numel, generator=seed)).to(dtype) for seed in seeds]


def add_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def add_in_fixed_order(*, device: torch.device, ranks: Ranks) -> Any:
    """Whether sums of ranks have the bits of their order, wherever numbers are in a tensor."""
    ranks.fixed_order = True
    found: list[bool] = []
    for dtype in (torch.float32, torch.bfloat16):
        parts = tensors_of(ranks.size, 1003, dtype)
        want = add_in_order(parts)
        for first in (0, 1, 500, 1002):
            part = parts[ranks.rank][first:].clone().to(device)
            found.append(torch.equal(sum_over_ranks(part).cpu(), want[first:]))
    ranks.fixed_order = False
    return found
