"""Replays against the rules themselves, asked one order at a time."""

import math

import numpy as np
import pytest

from treegen.evals.statistics import replay
from treegen.evals.statistics.replay import DrawnProblem, replay_early_stopping, replay_majority
from treegen.evals.statistics.votes import tally
from treegen.evals.verdict import Verdict
from treegen.search.strategies.majority import is_decided


def _drawn(seed: int, num: int = 20) -> DrawnProblem:
    rng = np.random.default_rng(seed)
    answers = rng.choice(["a", "b", "c", ""], num, p=[0.5, 0.25, 0.15, 0.1])
    verdicts = [Verdict(str(a) or None, a == "a") for a in answers]
    tokens = rng.integers(1, 60, num).tolist()
    return DrawnProblem(verdicts, tokens)


@pytest.mark.parametrize(("batch", "chance"), [(1, 0.95), (4, 0.8), (7, 0.99), (30, 0.9)])
def test_stopping_when_decided_is_the_rule_in_each_order(batch: int, chance: float) -> None:
    for seed in range(4):
        drawn = _drawn(seed)
        votes, tokens, samples = [], [], []
        for order in replay._orders(20, 16, seed).tolist():
            verdicts = [drawn.verdicts[i] for i in order]
            for end in [*range(batch, 20, batch), 20]:
                if is_decided([v.answer for v in verdicts[:end]], chance):
                    break
            votes.append(tally(verdicts[:end]).maj_at_k(end))
            tokens.append(sum(drawn.tokens[i] for i in order[:end]))
            samples.append(end)
        (found,) = replay_early_stopping(drawn, [chance], batch, orders=16, seed=seed)
        assert found.vote == pytest.approx(math.fsum(votes) / 16)
        assert found.tokens == pytest.approx(math.fsum(tokens) / 16)
        assert found.samples == pytest.approx(math.fsum(samples) / 16)


def test_the_replay_is_unbiased() -> None:
    """Its mean over many runs is that of many runs that really stop."""
    rng = np.random.default_rng(0)

    def answers(num: int) -> list[str]:
        return ["a" if right else "b" for right in rng.random(num) < 0.6]

    votes, tokens = [], []
    for _ in range(300):
        drawn = [Verdict(a, a == "a") for a in answers(16)]
        (found,) = replay_early_stopping(DrawnProblem(drawn, [1] * 16), [0.9], 2, orders=8)
        votes.append(found.vote)
        tokens.append(found.tokens)
    real_votes, real_tokens = [], []
    for _ in range(3000):
        mine_now = answers(16)
        end = next((e for e in range(2, 16, 2) if is_decided(mine_now[:e], 0.9)), 16)
        verdicts = [Verdict(a, a == "a") for a in mine_now[:end]]
        real_votes.append(tally(verdicts).maj_at_k(end))
        real_tokens.append(end)
    for ours, real in ((votes, real_votes), (tokens, real_tokens)):
        error = math.hypot(np.std(ours) / math.sqrt(300), np.std(real) / math.sqrt(3000))
        assert abs(float(np.mean(ours)) - float(np.mean(real))) < 4 * error


def test_a_majority_and_what_is_missing() -> None:
    drawn = _drawn(1)
    assert replay_majority(drawn, 20).tokens == pytest.approx(sum(drawn.tokens))
    assert replay_majority(drawn, 5).vote == pytest.approx(tally(drawn.verdicts).maj_at_k(5))
    silent = DrawnProblem([Verdict(None, False)] * 3, [1, 2, 3])
    assert replay_early_stopping(silent, [0.9], 2)[0].vote == 0.0
