"""What ranks of a model are told to load so that one of them fails."""

from typing import Any
from unittest.mock import patch

import torch

from treegen.engine.compute.model_runner import TokenChecksum
from treegen.errors import CapacityError
from treegen.llm import follower
from treegen.model import memory
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.parallel import shared_memory
from treegen.model.parallel.ranks import Ranks
from treegen.model.training import rank_updates


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


class SymmetricMemory:
    """torch's symmetric memory, which only rank 0 can allocate."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def empty(self, size: int, **_: object) -> torch.Tensor:
        if self.rank:
            raise RuntimeError("CUDA driver error: operation not supported")
        return torch.empty(size, dtype=torch.uint8)

    def rendezvous(self, *_: object) -> None:
        raise AssertionError("rank 0 waits for a rank that does not come")


def share_memory_of_rank_0(*, device: object, ranks: Ranks) -> Any:
    """Whether no rank shares memory, because rank 1 cannot allocate its own."""
    memory = SymmetricMemory(ranks.rank)
    with (
        patch.object(shared_memory, "import_module", lambda name: memory),
        patch.object(shared_memory, "_has_atomics", lambda *devices: True),
        patch.object(shared_memory, "_shared", []),
    ):
        gpu = torch.device("cuda", ranks.rank)
        shared = shared_memory.share_memory(ranks.rank, ranks.size, gpu, ranks.agree)
    return ranks.all_reduce_min(shared is None)


def load_with_failing_update(path: str, failing: int, *, device: Any, ranks: Ranks) -> Model:
    """Load a model; `write_shard` fails in one rank of it."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("GPU is full")

    if ranks.rank == failing:
        (follower if ranks.rank else rank_updates).write_shard = fail  # type: ignore[attr-defined]
    return load_model(path, check=False, device=device, ranks=ranks)


def load_with_full_memory(
    path: str, step: str, failing: int, *, device: Any, ranks: Ranks
) -> Model:
    """Load a model; one rank has no memory for its first cache.

    Args:
        path: The checkpoint.
        step: What raises the error: "cache_size" or "new_cache".
        failing: The rank without memory.
        device: The device.
        ranks: The ranks.
    """
    model = load_model(path, check=False, device=device, ranks=ranks)
    patched: Any = memory if step == "cache_size" else model
    original = getattr(patched, step)

    def fail(*_: object) -> None:
        setattr(patched, step, original)
        raise CapacityError("the memory is full")

    if ranks.rank == failing:
        setattr(patched, step, fail)
    return model
