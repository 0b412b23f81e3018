"""Log-sum-exps and most likely tokens of whole rows, against the obvious ways to find them."""

from __future__ import annotations

import pytest
import torch

from treegen.ops.sampling import logits as reductions
from treegen.ops.sampling.logits import argmax_tokens, log_sum_exp, topk_logits

SIZES = [1, 5, 127, 128, 255, 256, 257, 1000, 32_000, 70_001]


@pytest.mark.parametrize("size", SIZES)
def test_log_sum_exp_is_the_one_of_float64_whatever_rows_are_beside(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(40, size) * 5 + torch.randn(40, 1) * 50
    logits[3, : size // 2] = -torch.inf
    got = log_sum_exp(logits)
    want = logits.double().logsumexp(dim=-1)
    torch.testing.assert_close(got.double(), want, atol=0, rtol=2e-7)
    for start, stop in ((0, 1), (3, 5), (7, 40), (39, 40)):
        assert log_sum_exp(logits[start:stop]).equal(got[start:stop])
    assert log_sum_exp(logits[:0]).shape == (0,)
    logits[5, size // 2] = torch.nan
    bad = log_sum_exp(logits)
    assert bad[5].isnan() and bad[[0, 6, 39]].equal(got[[0, 6, 39]])


@pytest.mark.parametrize("size", SIZES)
def test_the_most_likely_token_is_the_first_of_the_largest(size: int) -> None:
    torch.manual_seed(size)
    few = torch.randint(0, 3, (60, size)).float()  # most tokens are as likely as others
    few[0] = -torch.inf
    few[1, -1] = 9
    few[2, torch.randint(0, size, (3,))] = 9
    few[3, size // 2] = torch.nan  # as the largest
    for logits in (few, torch.randn(60, size), torch.empty(0, size)):
        known = torch.where(logits.isnan(), torch.inf, logits)
        want = [row.tolist().index(row.max().item()) for row in known]
        assert argmax_tokens(logits).tolist() == want
    wide = torch.randn(6, size + 7)[:, 3 : size + 3]  # rows that are not dense
    assert argmax_tokens(wide).equal(wide.argmax(dim=-1))


@pytest.mark.parametrize("num", [1, 5, 256, 1024])
@pytest.mark.parametrize("size", [1024, 1031, 2048, 8192, 32_000, 70_001])
def test_the_largest_logits_are_those_of_a_sort(size: int, num: int) -> None:
    torch.manual_seed(size + num)
    few = torch.randint(0, 3, (20, size)).float()  # most tokens are as likely as others
    few[0] = -torch.inf
    few[1, torch.randint(0, size, (300,))] = torch.inf
    few[2, num:] = -torch.inf
    sorted_by_token = torch.linspace(-30, 30, size).expand(4, -1)
    wide = torch.randn(6, size + 7)[:, 3 : size + 3]  # rows that are not dense
    for logits in (few, torch.randn(20, size) * 4, sorted_by_token, wide, torch.empty(0, size)):
        found, token = topk_logits(logits, num)
        assert found.shape == token.shape == (len(logits), num)
        assert found.equal(logits.sort(dim=-1, descending=True).values[:, :num])
        assert found.equal(logits.gather(1, token))
        assert all(len(set(row)) == num for row in token.tolist())
    broken = torch.randn(3, size)
    broken[1, torch.randint(0, size, (size // 2,))] = torch.nan
    found, token = topk_logits(broken, num)  # what comes of such a row is of no use, but it ends
    assert found[::2].equal(broken[::2].sort(dim=-1, descending=True).values[:, :num])
    assert found[1].shape == (num,)


def test_sums_on_a_cpu_are_made_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made on the way is of a few rows, not of the size of the logits."""
    sizes: list[int] = []
    summed = reductions._log_sum_exp

    def noted(part: torch.Tensor) -> torch.Tensor:
        sizes.append(part.numel())
        return summed(part)

    monkeypatch.setattr(reductions, "_log_sum_exp", noted)
    log_sum_exp(torch.zeros(64, 32_000))
    assert max(sizes) <= 2**16 and sum(sizes) == 64 * 32_000
