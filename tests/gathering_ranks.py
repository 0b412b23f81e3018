"""What ranks are told to load where a test is about what they exchange, not about a model."""

from typing import Any

import torch

from treegen.model.parallel.ranks import Ranks


def gather_one_column(*, device: torch.device, ranks: Ranks) -> Any:
    """Column r is of rank r."""
    return ranks.beside(torch.arange(6.0, device=device).view(2, 3, 1) + 10 * ranks.rank)
