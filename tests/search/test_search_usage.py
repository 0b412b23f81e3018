"""What a search counts, and what a run of searches says about it, against counts by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from report_cases import make_search_run
from toy_search import hashed, run, start

from treegen.common.outputs import Score
from treegen.evals.progress.usage import format_sharing
from treegen.report.load import load_run
from treegen.report.tables import cards, sharing
from treegen.report.text import run_text
from treegen.search.ask_tell import AskTell, SampleRequest
from treegen.search.tree.node import SearchNode

# In toy models a letter is a token. The prompt has 4.
PROMPT = "abca"


async def sample(root: SearchNode) -> None:
    await root.sample(3, max_tokens=2)


async def sample_below(root: SearchNode) -> None:
    first = await root.sample(3, max_tokens=2)
    await first[0].sample(2, max_tokens=2)


async def sample_after_text(root: SearchNode) -> None:
    (first,) = await root.sample(1, max_tokens=2)
    await first.extend("bb").sample(2, max_tokens=2)


async def score(root: SearchNode) -> None:
    await root.score(["a", "bc", "cab"])


async def score_twice(root: SearchNode) -> None:
    await asyncio.gather(root.score(["a"]), root.score(["bc"]))


@pytest.mark.parametrize(
    ("search", "prefilled", "reprompted"),
    [
        (sample, 4, 4),  # the prompt, once
        (sample_below, 4, 4 + (4 + 2)),  # the second call has 2 sampled tokens after the prompt
        (sample_after_text, 4 + 2, 4 + (4 + 2 + 2)),
        (score, 4 + 6, 4 + 6),  # a call prefills its context once, and each of its texts
        (score_twice, 4 + 3, 2 * 4 + 3),
    ],
)
def test_reprompting_is_the_whole_cost_without_a_cache(
    search: Callable[[SearchNode], Awaitable[None]], prefilled: int, reprompted: int
) -> None:
    begun, _ = start(hashed("abc"), PROMPT)
    usage = run(begun, search).usage
    assert (usage.tokens_prefilled, usage.tokens_reprompted) == (prefilled, reprompted)


def test_told_scores_count_their_tokens() -> None:
    searches = AskTell(score, [PROMPT], count_tokens=len)
    (request,) = searches.ask()
    assert not isinstance(request, SampleRequest)
    searches.tell(
        request, [Score(tuple(map(ord, t)), (-1.0,) * len(t), True) for t in request.texts]
    )
    assert searches.ask() == []
    (result,) = searches.results
    assert result is not None
    assert (result.usage.tokens_prefilled, result.usage.tokens_reprompted) == (10, 10)


def test_a_run_does_not_count_prefilled_tokens_twice(tmp_path: Path) -> None:
    # Each of 12 searches prefilled 90 tokens, and would have computed 900 without a cache.
    view = load_run(make_search_run(tmp_path / "run"))
    line = (
        "prompt tokens computed: 1,080 instead of 10,800 without sharing (10.0 times fewer than "
        "one prompt per call)"
    )
    assert format_sharing(view.usage, unit=view.unit) == line
    results = {"usage": view.usage, "done": 12, "planned": 12}
    assert line in run_text(results, view.report, unit=view.unit)
    table = sharing(view)
    assert table is not None and table.lines[0] == f"P{line[1:]}."
    (card,) = [card for card in cards(view) if card.label == "prompt sharing"]
    assert card.value == "10.0\u00d7"
