"""Merging partial attention: exact, and deaf to what empty parts hold."""

from __future__ import annotations

import math

import pytest
import torch

from treegen.errors import InputError
from treegen.ops.attention import merge


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
@pytest.mark.parametrize("dim", [1, 8, 129])
def test_merging_parts_is_one_softmax(parts: int, dim: int) -> None:
    random = torch.Generator().manual_seed(parts)
    logits = torch.randn(5, 3, parts, 7, generator=random, dtype=torch.float64) * 8
    values = torch.randn(5, 3, parts, 7, dim, generator=random, dtype=torch.float64)
    outs = (logits.softmax(-1)[..., None, :] @ values)[..., 0, :].permute(2, 0, 1, 3)
    lses = logits.logsumexp(-1).permute(2, 0, 1)
    out, lse = merge(outs, lses)
    whole = logits.flatten(2)
    torch.testing.assert_close(
        out, (whole.softmax(-1)[..., None, :] @ values.flatten(2, 3))[..., 0, :]
    )
    torch.testing.assert_close(lse, whole.logsumexp(-1))
    out, lse = merge(list(outs.float()), list(lses.float()))
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(lse, whole.logsumexp(-1).float())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_an_empty_part_contributes_nothing(garbage: float) -> None:
    outs = torch.randn(3, 4, 2, 8)
    lses = torch.randn(3, 4, 2)
    lses[1] = -torch.inf
    outs[1] = garbage
    kept = outs.clone()
    got = merge(outs, lses)
    torch.testing.assert_close(got, merge(outs[::2], lses[::2]), rtol=1e-6, atol=1e-6)
    assert torch.equal(outs.nan_to_num(7), kept.nan_to_num(7))  # inputs are not written to


def test_rows_without_any_key_are_zero() -> None:
    out, lse = merge(torch.full((2, 1, 1, 4), math.nan), torch.full((2, 1, 1), -math.inf))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_extreme_logits_do_not_overflow() -> None:
    outs = torch.ones(3, 1, 1, 4)
    lses = torch.tensor([-1e30, 1e30, 88.0]).view(3, 1, 1)
    out, lse = merge(outs, lses)
    torch.testing.assert_close(out, torch.ones(1, 1, 4))
    assert float(lse) == pytest.approx(1e30)


@pytest.mark.parametrize(
    ("outs", "lses", "complaint"),
    [
        ([], [], "at least one"),
        ([torch.zeros(2, 1, 4)], [torch.zeros(3, 1)], "shape"),
        ([torch.zeros(2, 1, 4)], [], "the same number of outs and lses"),
        ([torch.zeros(2, 1, 4).bfloat16()], [torch.zeros(2, 1)], "bfloat16"),
    ],
)
def test_bad_parts_are_refused(
    outs: list[torch.Tensor], lses: list[torch.Tensor], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        merge(outs, lses)
