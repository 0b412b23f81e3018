"""Draws where each of several GPUs has a part of the logits: those of one that has them all.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/ops/sampling/test_divided_draws.py`.
"""

from typing import Any

import pytest
import torch
from devices import DEVICE, needs_triton
from torch import Tensor

from treegen.common.params import SamplingParams
from treegen.engine.compute.decode_step import FORCED, NUM_INPUTS, DecodeStep
from treegen.model.parallel.ranks import Ranks
from treegen.ops.sampling.batch import SamplingBatch

pytestmark = needs_triton
ROWS = 12


@pytest.mark.parametrize(("size", "parts"), [(5, 2), (10_000, 2), (9001, 4), (13_000, 3)])
def test_parts_draw_what_the_whole_draws(size: int, parts: int) -> None:
    from treegen.ops.sampling.kernels import VocabPart, draw_blocks

    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(ROWS, size, generator=generator) * 4).to(DEVICE)
    logits[:, ::3] = -torch.inf
    logits[7, size // 2] = torch.nan
    logits[8, size // 2] = torch.nan
    seeds = torch.randint(0, 2**62, (ROWS, 3), generator=generator).to(DEVICE)
    steps = torch.arange(ROWS, device=DEVICE)[:, None].expand(ROWS, 3).contiguous()
    temperature = (torch.rand(ROWS, generator=generator) + 0.3).to(DEVICE)
    greedy = torch.arange(ROWS, device=DEVICE) % 4 == 0
    rest = (seeds, steps, temperature, greedy)
    want = draw_blocks(logits, *rest)

    width = -(-size // parts)
    pieces = torch.nn.functional.pad(logits, (0, width * parts - size)).split(width, 1)
    vocab_parts = [
        VocabPart(r, r * width, max(min(size - r * width, width), 0)) for r in range(parts)
    ]
    sums: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        sums.append(tensor)
        return tensor

    for piece, part in zip(pieces, vocab_parts, strict=True):
        draw_blocks(piece.contiguous(), *rest, part=part, gather=note)
    draws = [
        draw_blocks(piece.contiguous(), *rest, part=part, gather=lambda _: torch.cat(sums, -1))
        for piece, part in zip(pieces, vocab_parts, strict=True)
    ]
    tokens, logprobs, lse = (torch.stack(each).sum(0) for each in zip(*draws, strict=True))
    is_number = want[2].isfinite()
    assert not is_number[[7, 8]].any()
    assert lse.isfinite().equal(is_number)
    # Float32 sums in other blocks may flip a draw that lies on a boundary.
    same = (tokens == want[0])[is_number]
    assert same.float().mean() > 0.98
    torch.testing.assert_close(lse[is_number], want[2][is_number])
    found = (logprobs - want[1])[is_number][same]
    assert found.abs().max() < 1e-4


class AbortedRanks(Ranks):
    """Ranks whose collectives a dead rank has aborted: the results are garbage."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.full_like(torch.cat([tensor] * self.size, -1), 1e30)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.tensor([2**62 + 17, -(2**40)]))


def test_garbage_of_an_aborted_collective_draws_tokens_of_the_vocabulary() -> None:
    size = 7000
    inputs = torch.zeros(NUM_INPUTS, ROWS, dtype=torch.int64, device=DEVICE)
    inputs[FORCED] = -1
    params = [SamplingParams(temperature=1.0)]
    sampling = SamplingBatch.of(params, torch.zeros(ROWS, dtype=torch.int64, device=DEVICE))
    nothing: Any = None
    ranks = AbortedRanks(0, 2, torch.device(DEVICE), None)
    step = DecodeStep(inputs, None, nothing, sampling, nothing, ranks=ranks, vocab_size=size)
    draws = step.draw_now(torch.randn(ROWS, size // 2, device=DEVICE))
    assert ((draws.tokens_PN >= 0) & (draws.tokens_PN < size)).all()
