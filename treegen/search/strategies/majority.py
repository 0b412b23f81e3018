"""Majority votes over sampled answers that stop once they are decided (adaptive consistency)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from treegen.common.checks import check_argument_types, check_counts, is_finite
from treegen.errors import InputError
from treegen.search.budget import BudgetReached
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Answer = Callable[[SearchNode], str | None]
"""Reads the answer of a solution, normalized so that equal answers compare equal; None if none."""


@check_argument_types
def lead_probability(first: int, second: int) -> float:
    """Return the probability that the leading answer stays ahead of the second, given their votes.

    It is P(p > 1/2) for p distributed as Beta(first + 1, second + 1): the beta rule of Aggarwal et
    al. 2023. It equals the probability of at most `first` heads in first + second + 1 tosses.
    """
    tosses = first + second + 1
    outcomes: int = sum(math.comb(tosses, heads) for heads in range(first + 1))
    return float(outcomes / 2**tosses)


def is_decided(answers: Iterable[str | None], confidence: float) -> bool:
    """Return whether the leading answer stays ahead with probability `confidence`.

    Args:
        answers: The answers so far; None is no answer.
        confidence: Probability at which the vote is decided.
    """
    top = [votes for _, votes in Counter(a for a in answers if a is not None).most_common(2)]
    return bool(top) and lead_probability(top[0], top[1] if len(top) > 1 else 0) >= confidence


@check_argument_types
async def majority(
    root: SearchNode,
    answer: Answer,
    *,
    max_samples: int = 40,
    batch: int = 4,
    confidence: float | None = 0.95,
    **overrides: Any,
) -> SearchOutcome:
    """Draw solutions until the beta rule says that the vote is decided, and let them vote.

    Solutions are read in the order in which they were started. So neither the votes nor the tree
    depend on which solutions end first.

    Args:
        root: Node to sample from.
        answer: Reads the answer of a solution.
        max_samples: Maximum number of solutions to draw.
        batch: Solutions to draw concurrently; fewer if the budget of tokens has no room for all of
            them. When the vote is decided, those still being drawn are cancelled.
        confidence: Probability at which the vote is decided; None draws `max_samples`.
        **overrides: Sampling parameters, as for `SearchNode.sample`.

    Raises:
        InputError: `confidence` is not between 0 and 1, or the temperature is 0.
    """
    check_counts(max_samples=max_samples, batch=batch)
    if confidence is not None and not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence!r}")
    params = replace(root.search.params, **overrides)
    if params.temperature == 0:
        raise InputError("majority voting requires different samples; set a temperature above 0")
    samples: list[SearchNode] = []
    answers: list[str | None] = []
    stopped = ""
    try:
        while len(samples) < max_samples and not stopped:
            n = min(batch, max_samples - len(samples))
            n = max(1, root.search.max_fitting_samples(n, params.max_tokens))
            async with aclosing(root.stream(n, **overrides)) as stream:
                async for sample in stream:
                    samples.append(sample)
                    answers.append(answer(sample))
                    if confidence is not None and is_decided(answers, confidence):
                        stopped = "agreement"
                        break
    except BudgetReached as end:
        stopped = str(end)
    return replace(_elect(samples, answers), stopped=stopped)


@check_argument_types
def vote(
    found: SearchOutcome, answer: Answer, weight: Callable[[SearchNode], float] | None = None
) -> SearchOutcome:
    """Let the candidates of a search vote on the answer; those with the winning answer come first.

    With the values of a verifier as weights, `lambda node: node.value or 0.0`, candidates of
    `rebase`, `dvts` and `beam` vote as in their papers. A log-probability is not a weight, because
    it is negative. Its exponential is: `lambda node: math.exp(node.value)`.

    Args:
        found: Outcome of any strategy.
        answer: Reads the answer of a candidate.
        weight: Gives the number of votes of a candidate, finite and at least 0; by default 1.

    Raises:
        InputError: A weight is negative or not finite.
    """
    answers = [answer(candidate) for candidate in found.candidates]
    elected = _elect(found.candidates, answers, weight)
    return replace(elected, best=elected.best or found.best, stopped=found.stopped)


def _weight(sample: SearchNode, weight: Callable[[SearchNode], float]) -> float:
    votes = weight(sample)
    if not (is_finite(votes) and votes >= 0):
        raise InputError(
            f"weight must return a finite number of at least 0, got {votes!r:.60}; return a value "
            "such as math.exp of a log-probability"
        )
    return votes


def _elect(
    samples: Sequence[SearchNode],
    answers: Sequence[str | None],
    weight: Callable[[SearchNode], float] | None = None,
) -> SearchOutcome:
    """Return the outcome of a vote: the winning answer's samples first, unanswered ones last."""
    votes: dict[str, float] = {}
    for sample, answer in zip(samples, answers, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + (_weight(sample, weight) if weight else 1)
    # Answers with equal votes stay in the order in which they were first given.
    rank = {answer: number for number, answer in enumerate(sorted(votes, key=lambda a: -votes[a]))}
    ranks = [len(rank) if answer is None else rank[answer] for answer in answers]
    order = sorted(range(len(samples)), key=ranks.__getitem__)
    return SearchOutcome(
        best=samples[order[0]] if order else None,
        candidates=tuple(samples[index] for index in order),
        answers=tuple(answers[index] for index in order),
        votes=votes,
    )
