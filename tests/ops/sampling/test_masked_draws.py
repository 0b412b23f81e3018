"""Draws under masks of bits: those of logits that are minus infinity where a bit is 0.

The kernels run on a GPU, or without one as `TRITON_INTERPRET=1 pytest tests/ops/sampling`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import DEVICE, needs_triton
from torch import Tensor

from treegen import SamplingParams
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.ops.sampling.logits import Masks

ROWS = 14


def case(size: int, words: int) -> tuple[Tensor, Masks, Tensor]:
    """Logits, masks of half of the rows, and which tokens each row may draw."""
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(size=(ROWS, size)).astype(np.float32)) * 4
    bits = rng.integers(-(2**31), 2**31, (ROWS // 2, words), dtype=np.int64).astype(np.int32)
    bits[0], bits[1], bits[2] = 0, 0, -1  # one token, another, and all
    bits[0, 0], bits[1, (size - 1) // 32] = 1, -(1 << (size - 1) % 32)
    index = np.full(ROWS, -1)
    index[::2] = rng.permutation(ROWS // 2)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :size] > 0
    may = np.where((index >= 0)[:, None], unpacked[index], True)
    return logits, Masks(torch.from_numpy(bits), torch.from_numpy(index)), torch.from_numpy(may)


@needs_triton
@pytest.mark.parametrize("size", [31, 4096, 9001])
@pytest.mark.parametrize("draws", [1, 3])
def test_the_kernel_draws_from_what_is_allowed_and_tells_the_models_probability(
    size: int, draws: int
) -> None:
    from treegen.ops.sampling.kernels import draw_blocks

    logits, masks, may = case(size, -(-size // 32) + 1)
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(0, 2**62, (ROWS, draws), generator=generator).to(DEVICE)
    temperature = (torch.rand(ROWS, generator=generator) + 0.3).to(DEVICE)
    temperature[::3] = 1
    greedy = torch.arange(ROWS, device=DEVICE) % 5 == 4
    forced = torch.full((ROWS,), -1, device=DEVICE)
    forced[3], forced[4] = 5, 7
    rest = (seeds, torch.zeros_like(seeds), temperature, greedy, forced)
    on_device = Masks(masks.bits_KW.to(DEVICE), masks.index_P.to(DEVICE))
    tokens, logprobs, lse = draw_blocks(logits.to(DEVICE), *rest, masks=on_device)
    barred = logits.masked_fill(~may, -torch.inf).to(DEVICE)
    assert tokens.equal(draw_blocks(barred, *rest)[0])
    assert may.gather(1, tokens.cpu())[forced.cpu() < 0].all()
    torch.testing.assert_close(lse.cpu(), logits.logsumexp(-1))
    torch.testing.assert_close(
        logprobs.cpu(), logits.log_softmax(-1).gather(1, tokens.cpu()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("size", [5, 31, 1000])
def test_the_reference_draws_from_what_is_allowed(size: int) -> None:
    logits, masks, may = case(size, -(-size // 32) + 1)
    seeds = torch.arange(ROWS * 4).reshape(ROWS, 4)
    params = SamplingBatch.of([SamplingParams()], torch.zeros(ROWS, dtype=torch.long))
    found = draw(logits, seeds, torch.zeros_like(seeds), params, masks=masks)
    want = draw(
        logits.masked_fill(~may, -torch.inf), seeds, torch.zeros_like(seeds), params
    ).tokens_PN
    assert found.tokens_PN.equal(want) and may.gather(1, want).all()
    torch.testing.assert_close(found.lse_P, logits.logsumexp(-1))
    expected = logits.log_softmax(-1).gather(1, want)
    torch.testing.assert_close(found.logprobs_PN, expected, rtol=1e-5, atol=1e-5)
