"""Seeds of samples: functions of the run's seed, the prompt and the sample index."""

from __future__ import annotations

import hashlib

from treegen.common.params import MAX_SEED
from treegen.prompts.plan.plan import Request


def row_seed(run_seed: int | None, prompt_id: str, sample_index: int) -> int:
    """Return the seed of one sample, 0 to 2**63 - 1: a hash of the arguments and nothing else.

    Args:
        run_seed: The seed of the run; None means 0.
        prompt_id: The id or origin of the prompt.
        sample_index: The sample's number among those of the prompt.
    """
    key = f"{run_seed or 0}\0{sample_index}\0{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") & MAX_SEED


def sample_seed(run_seed: int | None, request: Request, sample_index: int) -> int:
    """Return the seed of one sample of a request.

    Args:
        run_seed: The seed of the run; None means 0.
        request: The request.
        sample_index: The sample's number within the request.
    """
    return row_seed(run_seed, request.origin or request.id, request.first + sample_index)
