"""`SamplingBatchCache` gives what `SamplingBatch.of` gives, and makes it once for rows drawn
alike.
"""

from __future__ import annotations

import numpy as np
import torch

from treegen import SamplingParams
from treegen.ops.sampling.batch import NO_END, Bias, SamplingBatch, SamplingBatchCache

CPU = torch.device("cpu")


def test_what_is_remembered_is_what_would_be_made() -> None:
    rng = np.random.default_rng(0)
    sets = [SamplingParams(temperature=t, top_k=k) for t, k in ((0.0, 0), (0.5, 0), (2.0, 7))]
    sets.append(SamplingParams(temperature=0.5))  # equal to another one
    biases = [
        Bias(np.array([each]), np.array([-1.0], np.float32), np.array([NO_END])) for each in (3, 5)
    ]
    memo = SamplingBatchCache(CPU)
    for _ in range(300):
        num = int(rng.integers(1, 4))
        params = [sets[at] for at in rng.integers(0, len(sets), num)]
        added = [biases[at] for at in rng.integers(0, 2, num)] if rng.random() < 0.5 else []
        index = rng.integers(0, num, int(rng.integers(1, 5)))
        found = memo.of(params, added, index)
        want = SamplingBatch.of(params, torch.from_numpy(index), added)
        assert found.temperature_P.tolist() == want.temperature_P.tolist()
        assert found.all_greedy == want.all_greedy
        for actual, other in ((found.greedy_P, want.greedy_P), (found.top_k_P, want.top_k_P)):
            assert (None if actual is None else actual.tolist()) == (
                None if other is None else other.tolist()
            )
        logits, steps = torch.zeros(len(index), 8), torch.zeros(len(index), dtype=torch.int64)
        if want.biases is None:
            assert found.biases is None
        else:
            assert found.biases is not None
            assert found.biases.add(logits, steps).equal(want.biases.add(logits, steps))


def test_rows_that_are_drawn_alike_have_one_batch() -> None:
    memo, params = SamplingBatchCache(CPU), SamplingParams(temperature=0.7)
    first = memo.of([params], [], np.zeros(4, dtype=np.int64))
    assert memo.of([params], [], np.zeros(3, dtype=np.int64)) is not first
    memo.of([params, SamplingParams()], [], np.array([0, 1]))
    assert memo.of([params], [], np.zeros(4, dtype=np.int64)) is first
    memo.of([SamplingParams()], [], np.zeros(4, dtype=np.int64))
    assert memo.of([params], [], np.zeros(4, dtype=np.int64)) is not first
