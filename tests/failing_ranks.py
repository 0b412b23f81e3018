"""What ranks of a model are told to load so that one of them fails."""

import torch

from treegen.engine.compute.model_runner import TokenChecksum
from treegen.model.model import Model
from treegen.model.parallel.ranks import Ranks


def fail_in_rank_1(*, device: object, ranks: Ranks) -> Model:
    """Rank 1 fails, and rank 0 waits for it."""
    if ranks.rank == 1:
        raise ValueError("no luck")
    ranks.all_reduce_min(0)
    raise AssertionError("rank 0 waited in vain, and did not see it")


def draw_other_tokens(*, device: object, ranks: Ranks) -> Model:
    """Rank 1 draws other tokens than rank 0."""
    agreement = TokenChecksum(ranks)
    for _ in range(2):
        agreement.update(torch.tensor([[5], [7 + ranks.rank]]))
        agreement.compare_ranks()
    raise AssertionError("nobody saw it")
