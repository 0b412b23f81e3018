"""What ranks are told to load in tests: what they exchange, and models made in another way."""

from typing import Any

import torch

from treegen.model.linear.batch_invariant import BatchInvariantLayers
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.parallel.ranks import Ranks


def gather_one_column(*, device: torch.device, ranks: Ranks) -> Any:
    """Column r is of rank r."""
    return ranks.all_gather(torch.arange(6.0, device=device).view(2, 3, 1) + 10 * ranks.rank)


def load_in_order(path: str, *, device: torch.device, ranks: Ranks) -> Model:
    """A part of a model whose products are summed in one order, as on a GPU."""
    model = load_model(path, device=device, ranks=ranks)
    BatchInvariantLayers(model.module)
    return model
