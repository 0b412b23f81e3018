"""Votes: the beta rule, adaptive stopping, invalid answers, ties."""

import math
import random
from collections import Counter
from fractions import Fraction

import pytest
from toy_search import ToyModel, hashed, run, run_all, start

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.search.budget import Budget
from treegen.search.evaluate import by_function, sum_logprob
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.majority import (
    is_decided,
    lead_probability,
    majority,
    vote,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


def beta_above_half(a: int, b: int) -> Fraction:
    """P(p > 1/2) of Beta(a + 1, b + 1): x^a (1-x)^b integrated term by term, exactly."""

    def integral(start: Fraction) -> Fraction:
        # (1-x)^b is a polynomial; its coefficients by repeated multiplication.
        terms, zero = [Fraction(1)], Fraction(0)
        for _ in range(b):
            terms = [
                here - before for here, before in zip([*terms, zero], [zero, *terms], strict=True)
            ]
        return sum(
            (c * (1 - start ** (a + i + 1)) / (a + i + 1) for i, c in enumerate(terms)),
            start=Fraction(0),
        )

    return integral(Fraction(1, 2)) / integral(Fraction(0))


@pytest.mark.parametrize("a", [0, 1, 3, 4, 9, 20])
@pytest.mark.parametrize("b", [0, 1, 2, 9, 20])
def test_agreement_is_the_integral(a: int, b: int) -> None:
    assert lead_probability(a, b) == pytest.approx(float(beta_above_half(a, b)), abs=1e-12)


def test_when_a_vote_is_decided() -> None:
    assert not is_decided(["x"] * 3, 0.95)
    assert is_decided(["x"] * 4, 0.95)
    assert not is_decided(["x"] * 5 + ["y"], 0.95)  # P = 0.9375
    assert is_decided(["x"] * 6 + ["y"], 0.95)
    assert not is_decided([None] * 50, 0.95)
    assert not is_decided([None] * 50 + ["x"] * 3, 0.95)
    assert not is_decided([], 0.95)
    assert is_decided(["x", "y", "z"] * 4 + ["x"] * 12, 0.95)


def one_letter(**chances: float) -> ToyModel:
    """A model that writes one of some letters."""
    letters = "".join(chances)
    return ToyModel(letters, lambda text: [0.0, *chances.values()])


def letter(node: SearchNode) -> str | None:
    """The letter, but "i" is not a valid answer."""
    return None if node.text == "i" else node.text


def first_letter(node: SearchNode) -> str | None:
    return node.text[:1] or None


def elect(model: ToyModel, **options: object) -> tuple[SearchOutcome, SearchNode]:
    found: list[SearchOutcome] = []
    budget = options.pop("budget", None)
    assert budget is None or isinstance(budget, Budget)
    seed = random.randrange(10**6)
    search, _ = start(model, params=SamplingParams(max_tokens=1, seed=seed), budget=budget)

    async def fn(root: SearchNode) -> None:
        found.append(await majority(root, letter, **options))  # type: ignore[arg-type]

    run(search, fn)
    return found[0], search.root


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_unanimous_samples_stop_at_four(batch: int) -> None:
    found, root = elect(one_letter(x=1.0), batch=batch)
    assert found.votes == {"x": 4} and found.stopped == "agreement"
    assert len(found.candidates) == len(root.children) == 4
    assert found.answers == ("x",) * 4


@pytest.mark.parametrize("batch", [1, 7])
def test_invalid_answers_never_agree(batch: int) -> None:
    found, root = elect(one_letter(i=1.0), max_samples=20, batch=batch)
    assert found.votes == {} and found.stopped == ""
    assert found.answers == (None,) * 20 and len(root.children) == 20


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_stops_at_the_first_sample_that_decides(batch: int) -> None:
    for _ in range(10):
        found, root = elect(one_letter(x=0.5, y=0.3, i=0.2), batch=batch, max_samples=30)
        given = [letter(child) for child in root.children]
        decided = [n for n in range(1, 31) if is_decided(given[:n], 0.95)]
        assert len(given) == (decided[0] if decided else 30)
        assert found.stopped == ("agreement" if decided else "")
        assert found.votes == Counter(answer for answer in given if answer is not None)
        winner = max(found.votes, key=lambda answer: found.votes[answer])
        assert found.best is not None and found.best.text == winner
        assert Counter(found.answers) == Counter(given)
        votes = [found.votes[answer] if answer else 0 for answer in found.answers]
        assert votes == sorted(votes, reverse=True)


def test_what_is_counted_does_not_depend_on_what_ends_first() -> None:
    """Samples have lengths of 1 to 40, so that later ones end before earlier ones."""
    model = hashed("xyz", eos=0.1)

    async def fn(root: SearchNode) -> SearchOutcome:
        return await majority(root, first_letter, batch=6, max_samples=24)

    params = SamplingParams(max_tokens=40, seed=random.randrange(1000))
    alone = run(start(model, params=params, name="one")[0], fn)
    beside = [start(model, params=params, name=name)[0] for name in ("zero", "one", "two")]
    assert run_all(beside, fn)[1].tree == alone.tree
    kept = len(alone.tree.nodes) - 1
    assert kept == len(alone.answers) == alone.usage.nodes


def test_those_still_drawn_are_cancelled() -> None:
    """All agree, at lengths from 1 to hundreds: four decide, and most others go on for long."""
    model = ToyModel("x", lambda text: [0.01 if text else 0.0, 0.99])
    lengths = []
    for batch in (4, 40):
        search, backend = start(model, params=SamplingParams(max_tokens=2000))

        async def fn(root: SearchNode, batch: int = batch) -> SearchOutcome:
            return await majority(root, first_letter, batch=batch)

        result = run(search, fn)
        assert result.stopped == "agreement" and len(result.tree.nodes) == 5
        assert backend.live == {node._context for node in search.nodes()}
        lengths.append(max(node.n_tokens for node in result.tree.nodes))
    assert lengths[0] == lengths[1] and len(backend.drawn) < 40
    # Nobody decoded a step more than the last of those that decided.
    assert search.usage.tokens_decoded <= 40 * (lengths[0] + 3)


def test_a_budget_keeps_the_votes_that_were_cast() -> None:
    for tokens in range(1, 13):
        found, root = elect(
            one_letter(x=0.4, y=0.6), batch=5, confidence=None, budget=Budget(tokens=tokens)
        )
        assert len(root.children) == tokens == len(found.answers) == sum(found.votes.values())
        assert found.stopped == f"budget of {tokens} tokens reached"


def test_of_tied_answers_the_first_wins() -> None:
    for _ in range(20):
        found, root = elect(one_letter(x=0.5, y=0.5), max_samples=2, confidence=None)
        assert found.best is root.children[0]


def test_candidates_of_another_search_vote() -> None:
    async def fn(root: SearchNode) -> SearchOutcome:
        found = await best_of_n(root, 30, by_function(lambda node: node.text == "y"))
        plain, weighted = vote(found, letter), vote(found, letter, lambda node: node.value or 0)
        counts = Counter(node.text for node in root.children)
        assert plain.votes == {"x": counts["x"], "y": counts["y"]}
        assert weighted.votes == {"x": 0, "y": counts["y"]}
        assert weighted.best is not None and weighted.best.text == "y"
        return plain

    result = run(start(one_letter(x=0.6, y=0.3, i=0.1), params=SamplingParams(max_tokens=1))[0], fn)
    assert result.answer == max(result.votes, key=lambda answer: result.votes[answer])
    assert result.answers[-1] is None or None not in result.answers


def test_a_log_probability_is_no_weight() -> None:
    """Two likely samples of one answer against an unlikely one of another."""

    async def fn(root: SearchNode) -> SearchOutcome:
        found = await best_of_n(root, 60, sum_logprob)
        for wrong in (lambda node: node.value, lambda node: math.nan, lambda node: math.inf):
            with pytest.raises(InputError, match=r"weight must return a finite number"):
                vote(found, letter, wrong)
        return vote(found, letter, lambda node: math.exp(node.logprob))

    result = run(start(one_letter(x=0.7, y=0.3), params=SamplingParams(max_tokens=1))[0], fn)
    counts = Counter(result.answers)
    assert result.answer == "x"
    assert result.votes == pytest.approx({"x": 0.7 * counts["x"], "y": 0.3 * counts["y"]})


def test_greedy_votes_are_refused() -> None:
    with pytest.raises(InputError, match="different samples"):
        elect(one_letter(x=1.0), temperature=0)
    with pytest.raises(InputError, match="confidence"):
        elect(one_letter(x=1.0), confidence=1.5)
