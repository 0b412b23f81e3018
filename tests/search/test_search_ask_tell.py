"""Searches whose samples are made outside: in any order, by anyone, with the same trees."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from toy_search import ToyBackend, hashed, run, start

from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.search.ask_tell import (
    MODEL_END,
    AskTell,
    SampleRequest,
    ScoreRequest,
    SearchRequest,
    TextContext,
)
from treegen.search.budget import Budget, BudgetReached
from treegen.search.evaluate import choice_scores, value_prompt
from treegen.search.propose import sample_steps
from treegen.search.strategies.beam import beam
from treegen.search.strategies.majority import majority
from treegen.search.tree.node import Search, SearchNode, is_ended
from treegen.search.tree.result import SearchOutcome

MODEL = hashed("abc.", eos=0.02)
PARAMS = SamplingParams(max_tokens=6, seed=3)
STEPS = sample_steps(3, ".")


def done(node: SearchNode) -> bool:
    return len(node.path_text) > 8


async def by_beam(root: SearchNode) -> SearchOutcome:
    value = value_prompt(lambda node: f"V{node.path_text}", len, n=2)
    return await beam(root, STEPS, value, done, width=3, depth=4)


async def by_choice(root: SearchNode) -> SearchOutcome:
    judge = choice_scores(lambda node: node.path_text, {"a": 1.0, ".": 0.0})
    return await beam(root, STEPS, judge, done, width=2, depth=3)


def answer(request: SearchRequest) -> Sequence[Completion | Score]:
    """What the toy says to a request."""
    backend = ToyBackend(MODEL)

    async def ask() -> Sequence[Completion | Score]:
        search = Search(backend, request.context.text, name="any")
        context = search.root._context
        assert context is not None
        if isinstance(request, ScoreRequest):
            return await backend.score(context, request.texts, search)
        drawn = await backend.sample(context, request.key, request.indices, request.params, search)
        return [each.completion for each in drawn if each is not None]

    return asyncio.run(ask())


def drive(
    searches: AskTell, answer: Callable[[SearchRequest], Sequence[Completion | Score]]
) -> int:
    """Answer everything, in no order; returns the number of rounds."""
    rounds, open_requests = 0, list[SearchRequest]()
    while not searches.done:
        open_requests += searches.ask()
        rounds += 1
        random.shuffle(open_requests)
        for _ in range(random.randint(min(1, len(open_requests)), len(open_requests))):
            request = open_requests.pop()
            assert searches.tell(request, answer(request)) or not searches.is_wanted(request)
    return rounds


@pytest.mark.parametrize("fn", [by_beam, by_choice])
def test_trees_are_those_of_the_engine(fn: Callable[[SearchNode], object]) -> None:
    problems = ["a", "bb", ("named", "c")]
    searches = AskTell(fn, problems, PARAMS)  # type: ignore[arg-type]
    drive(searches, answer)
    for name, prompt, result in zip("01", ["a", "bb"], searches.results, strict=False):
        other = run(start(MODEL, prompt, name=name, params=PARAMS)[0], fn)  # type: ignore[arg-type]
        assert result is not None and result.tree == other.tree and result.best == other.best
        assert result.usage.tokens_decoded == other.usage.tokens_decoded
    assert searches.results[2] is not None and searches.results[2].name == "named"


def test_one_ask_has_what_all_searches_want() -> None:
    searches = AskTell(by_beam, ["a", "b", "c"], PARAMS)
    first = searches.ask()
    assert [request.search for request in first] == ["0", "1", "2"]
    assert all(isinstance(request, SampleRequest) for request in first)
    assert searches.ask() == [] and not searches.done
    for request in first:
        searches.tell(request, answer(request))
    values = searches.ask()
    assert {request.search for request in values} == {"0", "1", "2"}
    assert len(values) == sum(
        len({c.text for c in answer(r) if isinstance(c, Completion)}) for r in first
    )
    searches.close()


def test_plain_texts_are_answers() -> None:
    async def fn(root: SearchNode) -> list[SearchNode]:
        (child,) = await root.sample(1, stop="\n")
        tool = child.extend(" = 4\n")
        return await tool.sample(2)

    searches = AskTell(fn, ["What is 2 + 2?"], count_tokens=lambda text: len(text.split()))
    (first,) = searches.ask()
    assert first.context == TextContext((), "What is 2 + 2?", 5)
    assert isinstance(first, SampleRequest) and first.params.stop == "\n"
    assert searches.tell(first, ["2 + 2"])
    (second,) = searches.ask()
    assert second.context.text == "What is 2 + 2?2 + 2 = 4\n"
    assert isinstance(second, SampleRequest) and len(second.seeds) == 2
    assert searches.tell(second, ["It is 4.", "4!"])
    assert searches.ask() == [] and searches.done
    (result,) = searches.results
    assert result is not None and result.best_text == "2 + 2 = 4\nIt is 4."
    assert result.usage.calls == 2 and result.usage.nodes == 4


def test_ids_are_the_same_in_every_run() -> None:
    seen: list[set[str]] = []
    for _ in range(2):
        ids: set[str] = set()

        def noting(request: SearchRequest, ids: set[str] = ids) -> Sequence[Completion | Score]:
            ids.add(request.id)
            return answer(request)

        drive(AskTell(by_beam, ["a", "b"], PARAMS), noting)
        drive(AskTell(by_choice, ["a", "b"], PARAMS), noting)
        seen.append(ids)
    assert seen[0] == seen[1]


def test_what_a_vote_no_longer_needs_is_withdrawn() -> None:
    async def fn(root: SearchNode) -> SearchOutcome:
        return await majority(root, lambda node: node.text, batch=8)

    searches = AskTell(fn, ["q"])
    requests = searches.ask()
    assert len(requests) == 8
    for request in requests[:4]:
        assert searches.tell(request, ["x"])
        assert not searches.tell(request, ["x"])
    assert searches.is_wanted(requests[5])
    assert searches.ask() == [] and searches.done
    assert not searches.is_wanted(requests[5]) and not searches.tell(requests[5], ["x"])
    (result,) = searches.results
    assert result is not None and result.votes == {"x": 4} and result.stopped == "agreement"


def test_a_budget_withdraws_what_is_open() -> None:
    searches = AskTell(by_beam, ["a"], PARAMS, budget=Budget(tokens=20))
    drive(searches, answer)
    (result,) = searches.results
    assert result is not None and result.stopped == "budget of 20 tokens reached"
    assert result.usage.tokens_decoded >= 20 and len(result.tree.nodes) > 3


def test_searches_can_be_stopped_and_closed() -> None:
    searches = AskTell(by_beam, ["a", "b"], PARAMS)
    requests = searches.ask()
    searches.tell(requests[0], answer(requests[0]))
    searches.stop("enough")
    assert searches.ask() == [] and searches.done
    assert [result.stopped for result in searches.results if result] == ["enough"] * 2
    assert searches.results[0] is not None and len(searches.results[0].tree.nodes) == 4

    with AskTell(by_beam, ["a"], PARAMS) as searches:
        searches.ask()
    assert searches.results == [None] and searches.ask() == []


def test_a_failing_search_fails_alone() -> None:
    async def fn(root: SearchNode) -> SearchNode:
        (child,) = await root.sample(1)
        if root.search.name == "1":
            fail()
        return child

    def fail() -> None:
        raise ValueError("no")

    searches = AskTell(fn, ["a", "b"], PARAMS)
    drive(searches, answer)
    errors = [result.error for result in searches.results if result]
    file = Path(__file__).name
    line = fail.__code__.co_firstlineno + 1
    assert errors == [None, f"ValueError: no ({file}:{line}, in fail)"]  # the innermost place
    assert searches.results[1] is not None and len(searches.results[1].tree.nodes) == 2


def test_it_is_warned_if_all_searches_fail() -> None:
    async def fn(root: SearchNode) -> None:
        await root.sample(1)
        raise ValueError("no")

    searches = AskTell(fn, ["a", "b"], PARAMS)
    with pytest.warns(
        RuntimeWarning,
        match=r"all 2 searches failed; the first error: ValueError: no \(\S+\.py:\d+, in fn\)",
    ):
        drive(searches, answer)
    assert searches.ask() == []


def test_asking_waits_for_tools() -> None:
    async def fn(root: SearchNode) -> list[SearchNode]:
        await asyncio.sleep(0.02)
        text = await asyncio.to_thread(lambda: "tool")
        return await root.extend(text).sample(1)

    searches = AskTell(fn, ["a"])
    (request,) = searches.ask()
    assert request.context.text == "atool"
    searches.tell(request, ["b"])
    assert searches.ask() == [] and searches.done


def test_the_loop_may_itself_be_in_an_event_loop() -> None:
    async def notebook() -> None:
        searches = AskTell(by_choice, ["a"], PARAMS)
        while requests := searches.ask():
            for request in requests:
                answers = await asyncio.to_thread(answer, request)
                searches.tell(request, answers)
        assert searches.done

    asyncio.run(notebook())


def test_wrong_answers_are_refused() -> None:
    with AskTell(by_beam, ["a"], PARAMS) as searches:
        (request,) = searches.ask()
        for wrong in ([], ["a"] * 4, "abc", [Score((1,), (-1.0,), True)] * 3, [None] * 3):
            with pytest.raises(InputError, match="must be a list of 3 Completion objects"):
                searches.tell(request, wrong)  # type: ignore[arg-type]
        assert searches.tell(request, ["a", "b", "c"])
    with AskTell(by_choice, ["a"], PARAMS) as searches:
        (request,) = searches.ask()
        searches.tell(request, ["a", "b", "c"])
        with pytest.raises(InputError, match="must be a list of 2 Score objects"):
            searches.tell(searches.ask()[0], ["a", "b"])


def test_names_are_unique() -> None:
    with pytest.raises(InputError, match="two problems are named '1'"):
        AskTell(by_beam, [("1", "a"), "b"])


def test_token_ids_are_prompts() -> None:
    async def fn(root: SearchNode) -> list[SearchNode]:
        return await root.sample(1)

    with AskTell(fn, [[1, 2, 3]]) as searches:
        (request,) = searches.ask()
        assert request.context == TextContext((1, 2, 3), "", 3)
    with pytest.raises(InputError, match="text or token ids"):
        AskTell(fn, [[{"role": "user", "content": "x"}]])


def test_no_problems_are_done_at_once() -> None:
    searches = AskTell(by_beam, [])
    assert searches.done and searches.ask() == [] and searches.results == []


# Plain texts


def letters_of(text: str) -> int:
    return len(text)


def test_texts_are_charged_to_the_budget() -> None:
    async def endless(root: SearchNode) -> None:
        while True:
            await root.sample(1)

    searches = AskTell(endless, ["a"], budget=Budget(tokens=50), count_tokens=letters_of)
    answered = 0
    while requests := searches.ask():
        for request in requests:
            assert searches.tell(request, ["seven. "])
            answered += 1
    (result,) = searches.results
    assert answered == 8 and result is not None
    assert result.usage.tokens_decoded == 56 and result.stopped == "budget of 50 tokens reached"


def test_texts_that_nothing_counts_are_refused_under_a_budget_of_tokens() -> None:
    async def once(root: SearchNode) -> list[SearchNode]:
        return await root.sample(1)

    with AskTell(once, ["a"], budget=Budget(tokens=50)) as searches:
        (request,) = searches.ask()
        assert isinstance(request, SampleRequest)
        with pytest.raises(InputError, match="pass count_tokens to AskTell"):
            searches.tell(request, ["a"])
        counted = Completion("a", 0, 0, "abc", (1, 2, 3), (-1.0, -1.0, -1.0), "stop", 0)
        assert searches.tell(request, [counted])
        assert searches.ask() == []
    (result,) = searches.results
    assert result is not None and result.usage.tokens_decoded == 3


@pytest.mark.parametrize(
    ("text", "overrides", "end", "is_end"),
    [
        ("It is 4.", {}, ("stop", MODEL_END), True),
        ("2 + 2\n", {"stop": "\n", "include_stop": True}, ("stop", "\n"), False),
        ("It is 4.", {"stop": ["\n", ";"], "include_stop": True}, ("stop", MODEL_END), True),
        ("a\n\n", {"stop": ["\n", "\n\n"], "include_stop": True}, ("stop", "\n\n"), False),
        ("2 + 2", {"stop": "\n"}, ("stop", None), False),
        ("0123456789", {"max_tokens": 10}, ("length", None), False),
        ("0123456789", {"max_tokens": 10, "stop": "\n"}, ("length", None), False),
    ],
)
def test_a_text_ends_as_it_shows(
    text: str, overrides: dict[str, object], end: tuple[str, object], is_end: bool
) -> None:
    async def once(root: SearchNode) -> list[object]:
        (node,) = await root.sample(1, **overrides)
        return [node.finish_reason, node.stop, is_ended(node), node.num_context_tokens]

    searches = AskTell(once, ["a"], count_tokens=letters_of)
    searches.tell(searches.ask()[0], [text])
    assert searches.ask() == []
    (result,) = searches.results
    assert result is not None and result.value == [*end, is_end, 1 + len(text)]


def test_a_text_by_which_the_model_ends_is_not_gone_on_from() -> None:
    """Steps of lines, of which the model's last one has no newline."""
    texts = {"q": "one\n", "qone\n": "two\n", "qone\ntwo\n": "The end."}

    async def fn(root: SearchNode) -> SearchOutcome:
        async def length(nodes: Sequence[SearchNode]) -> list[float]:
            return [float(len(node.path_text)) for node in nodes]

        return await beam(root, sample_steps(1, "\n"), length, is_ended, width=1, depth=9)

    searches = AskTell(fn, ["q"], count_tokens=letters_of)
    while requests := searches.ask():
        for request in requests:
            searches.tell(request, [texts[request.context.text]])
    (result,) = searches.results
    assert result is not None and result.best_text == "one\ntwo\nThe end."
    assert result.candidates == (3,) and result.stopped == "" and result.usage.calls == 3


def test_seconds_end_a_wait_for_a_tool() -> None:
    async def fn(root: SearchNode) -> SearchOutcome:
        (node,) = await root.sample(1)
        try:
            await asyncio.sleep(1000)
        except BudgetReached as end:
            return SearchOutcome(node, (node,), stopped=str(end))
        return SearchOutcome(None)

    searches = AskTell(fn, ["a", "b"], budget=Budget(seconds=0.05))
    while requests := searches.ask():
        for request in requests:
            searches.tell(request, ["x"])
    for result in searches.results:
        assert result is not None and result.stopped == "budget of 0.05 seconds reached"
        assert result.best_text == "x" and result.error is None
