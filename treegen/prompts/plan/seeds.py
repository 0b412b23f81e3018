"""Seeds of samples: functions of the run's seed, the prompt and the sample index."""

from __future__ import annotations

import hashlib

from treegen.common.params import MAX_SEED
from treegen.prompts.plan.plan import Request


def row_seed(run_seed: int | None, prompt_id: str, sample_index: int) -> int:
    """Seed of one sample, from 0 to 2**63 - 1: a hash of what names it and nothing else.

    A run seed of None is 0.
    """
    key = f"{run_seed or 0}\0{sample_index}\0{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") & MAX_SEED


def sample_seed(run_seed: int | None, request: Request, sample_index: int) -> int:
    """Seed of one sample of a request."""
    return row_seed(run_seed, request.origin or request.id, request.first + sample_index)
