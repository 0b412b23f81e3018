"""Samples that may become long, in little memory: rows start on what they need, and give way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fakes import EOS, HistoryModel, scheduler_of
from torch import Tensor

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.engine.scheduler import Scheduler
from treegen.model.batch import Batch
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.plan import Request

_PROMPT = 8  # tokens
_PAGE = 8  # tokens
_FIRST = 2  # the token whose samples have the first of the lengths


class LengthModel(HistoryModel):
    """A sample's first token says how long it becomes; it is repeated until then."""

    def __init__(self, lengths: Sequence[int], shares: Sequence[float]) -> None:
        super().__init__()
        self._length = torch.zeros(self.vocab_size, dtype=torch.int64)
        self._length[_FIRST : _FIRST + len(lengths)] = torch.tensor(lengths)
        self._begin = torch.full((self.vocab_size,), -1e9)
        self._begin[_FIRST : _FIRST + len(shares)] = torch.tensor(shares).log()

    def forward(self, batch: Batch) -> Tensor:
        tokens, at = batch.tokens_T[batch.logits_at_S], batch.positions_T[batch.logits_at_S]
        begins = at == _PROMPT - 1
        ends = at - _PROMPT + 2 >= self._length[tokens]
        logits = torch.full((len(tokens), self.vocab_size), -1e9)
        logits[torch.arange(len(tokens)), torch.where(ends, EOS, tokens)] = 0.0
        logits[begins] = self._begin
        return logits


def run(
    lengths: Sequence[int],
    shares: Sequence[float],
    *,
    tokens: int,
    limit: int,
    samples: int,
    prompts: int = 1,
    run_ahead: bool = False,
) -> tuple[Scheduler, dict[int, list[int]]]:
    """A run in a cache of so many tokens, and the steps in which samples of each length ended."""
    model, params = LengthModel(lengths, shares), SamplingParams(max_tokens=limit)
    requests = [
        Request(f"p{i}", np.array([3] * (_PROMPT - 2) + [i, 0], np.int32), samples, samples, limit)
        for i in range(prompts)
    ]
    plan = compile_plan(requests, token_bytes=64, num_layers=1)
    cache = model.new_cache(tokens // _PAGE, _PAGE)
    scheduler = scheduler_of(plan, model, cache, params, prefill_chunk=256, run_ahead=run_ahead)
    ended: dict[int, list[int]] = {}
    found: list[Completion] = []
    steps = 0
    while scheduler.has_work:
        steps += 1
        new = scheduler.step()
        for completion in new:
            ended.setdefault(completion.num_tokens, []).append(steps)
        found += new
        if steps % 50 == 0:
            scheduler.check()
    assert len(found) == prompts * samples
    for completion in found:  # as the model has it, whoever gave way
        assert set(completion.tokens[:-1]) == {completion.tokens[0]}
        assert completion.num_tokens == lengths[completion.tokens[0] - _FIRST]
    return scheduler, ended


def test_rows_start_on_what_they_need_not_on_their_limit() -> None:
    """The cache holds one row at its limit, and dozens as they are."""
    scheduler, _ = run([20, 40], [1, 1], tokens=2048, limit=2000, samples=64)
    # As long as none has ended, each is expected to have 512 tokens.
    assert scheduler.usage.peak_rows > 30
    assert scheduler.usage.decode_steps < 250
    assert scheduler.usage.preemptions == 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_long_rows_do_not_starve_short_ones(run_ahead: bool) -> None:
    """A third of the samples are far longer than the others, and two fill the cache."""
    scheduler, ended = run(
        [20, 60, 400],
        [4, 4, 4],
        tokens=1000,
        limit=450,
        samples=12,
        prompts=3,
        run_ahead=run_ahead,
    )
    short, long = np.mean(ended[20] + ended[60]), np.mean(ended[400])
    assert short < long / 3
    # A short row may have to wait for one long one to end, but not for all of them.
    assert max(ended[20] + ended[60]) < max(ended[400]) / 2
    usage = scheduler.usage
    # Rows that have given way wait until there is room, not until the next page is free.
    assert 0 < usage.preemptions < 40
    assert usage.recomputed_tokens < 0.6 * usage.decoded_tokens


def test_of_long_rows_as_many_run_as_their_ends_allow() -> None:
    """Those that end give their pages back, so more run than there would be room for at the end."""
    scheduler, ended = run([240], [1], tokens=960, limit=240, samples=24)
    assert set(ended) == {240}
    usage = scheduler.usage
    # Four fit at their full length, and more while they are of different ages.
    assert usage.decoded_tokens / usage.decode_steps > 3.5
    assert usage.recomputed_tokens < 0.3 * usage.decoded_tokens
