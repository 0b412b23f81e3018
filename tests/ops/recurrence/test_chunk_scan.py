"""Mamba2's chunks against the same recurrence a token at a time, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from treegen.model.recurrent import mamba2 as module
from treegen.model.recurrent.mamba2 import chunk_scan

SHAPES = [
    # N, L, G, R, V, K
    (1, 1, 1, 1, 4, 4),
    (3, 7, 2, 3, 6, 5),
    (2, 128, 1, 4, 8, 16),
    (2, 129, 2, 2, 8, 16),
    (5, 300, 1, 2, 4, 8),
    (1, 1000, 1, 4, 8, 16),
]


def case_of(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    num, length, groups, heads, width, keys = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    # Some heads forget nothing, others all but everything.
    decay = -(torch.rand(num, length, groups, heads, generator=generator) ** 4) * 40
    return (
        normal(num, length, groups, heads, width),
        decay,
        normal(num, length, groups, keys),
        normal(num, length, groups, keys),
        normal(num, groups, keys, heads, width),
    )


def slow(x: Tensor, decay: Tensor, keys: Tensor, queries: Tensor, state: Tensor) -> list[Tensor]:
    outs = []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, :, None].exp()
        state = state + keys[:, t, :, :, None, None] * x[:, t, :, None]
        outs.append(torch.einsum("ngk,ngkrv->ngrv", queries[:, t], state))
    return [torch.stack(outs, 1), state]


@pytest.mark.parametrize("memory", [1, 2**20, 2**28])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_what_single_tokens_make(
    shape: tuple[int, ...], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WEIGHTS", memory)
    case = case_of(shape)
    before = [each.clone() for each in case]
    expected = slow(*(each.double() for each in case))
    for got, want in zip(chunk_scan(*case), expected, strict=True):
        assert got.shape == want.shape and got.dtype == torch.float32
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()
    assert all(map(torch.equal, case, before))


def test_a_text_takes_memory_for_a_part_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a chunk have no axis of keys: 4 MB a token for Granite 4's heads."""
    monkeypatch.setattr(module, "_WEIGHTS", 2**22)
    num, length, heads, width, keys = 2, 2048, 8, 16, 32
    case = case_of((num, length, 1, heads, width, keys))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        chunk_scan(*case)
    largest = max(event.self_cpu_memory_usage for event in watched.events())
    whole = num * length * heads * width * 4
    assert 0 < largest <= max(whole, 2**22)
