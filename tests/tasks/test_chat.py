"""Searches of chats: their settings, checked, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from small_searches import SMALL, exact_demo

from treegen import LLM, SamplingParams
from treegen.errors import InputError
from treegen.evals.search.methods import TEXT_METHODS
from treegen.search.budget import Budget
from treegen.search.tree.result import SearchResult
from treegen.tasks.chat import ChatSearch, ChatSearches

QUESTION = "Question: Tom has 3 apples and buys 5 more. How many apples does Tom have?\nAnswer:"
STEPS = (
    "Combine the numbers to reach the target. Use each number once.\n\nInput: 1 4 7\nTarget: 12\n"
    "Steps:\n4 + 7 = 11 (left: 1 11)\n1 + 11 = 12 (left: 12)\n\nInput: 3 6 9\nTarget: 18\nSteps:\n"
    "9 + 6 = 15 (left: 3 15)\n15 + 3 = 18 (left: 18)\n\nInput: 2 5 3\nTarget: 10\nSteps:\n"
)
PARAMS = SamplingParams(max_tokens=16, seed=3)
BUDGET = Budget(tokens=60)  # which mcts, rstar and others reach


@pytest.fixture(name="llm", scope="module")
def _llm() -> LLM:
    return exact_demo()


@pytest.fixture(name="searches", scope="module")
def _searches() -> ChatSearches:
    return ChatSearches()


def prepare(
    searches: ChatSearches,
    method: str,
    options: Mapping[str, Any],
    budget: Budget = BUDGET,
    **params: Any,
) -> ChatSearch:
    return searches.prepare(
        method,
        options,
        params=replace(PARAMS, **params),
        budget=budget,
        question=QUESTION,
        instruction=lambda text: f"\n{text}\n",
    )


def run(llm: LLM, search: ChatSearch) -> SearchResult:
    (result,) = llm.search(search, [("chat", QUESTION)], search.params, budget=search.budget)
    return result


def test_all_methods_are_tried() -> None:
    assert set(SMALL) == set(TEXT_METHODS) == set(ChatSearches.methods)


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_each_method_answers_a_chat_within_its_budget(
    llm: LLM, searches: ChatSearches, method: str
) -> None:
    search = prepare(searches, method, SMALL[method])
    result = run(llm, search)
    assert result.error is None and result.best is not None
    assert 0 < result.usage.tokens_decoded <= 60
    text = search.text(result.tree, result.best)
    assert text.strip() and not text.startswith("Question")
    assert search.answer("It is 5. The answer is 12.") is not None
    assert run(llm, search).tree == result.tree


@pytest.mark.parametrize(
    ("method", "options", "parameter", "message"),
    [
        ("beam", {"widht": 3}, None, "method beam has no option 'widht'; did you mean 'width'"),
        ("beam", {"width": 0}, "width", "width must be at least 1, got 0"),
        ("beam", {"width": -(10**30)}, "width", "width must be at least 1"),
        ("beam", {"width": "3"}, "width", "width must be an integer, got '3'"),
        ("beam", {"width": True}, "width", "width must be an integer, got True"),
        ("beam", {"width": 2.5}, "width", "width must be an integer"),
        ("beam", {"width": [4]}, "width", "width must be an integer"),
        ("dvts", {"width": 10**9}, "width", "width must be at most 2,000"),
        ("best-of-n", {"num_samples": 10**18}, "num_samples", "must be at most 2,000"),
        ("best-of-n", {"width": 4}, "width", "width= has no effect on best-of-n"),
        ("best-of-n", {"evaluate": "reward:/etc"}, "evaluate", "one of logprob, min-logprob"),
        ("best-of-n", {"evaluate": "verifier"}, "evaluate", "one of logprob, min-logprob"),
        ("majority", {"evaluate": "logprob"}, "evaluate", "evaluate= has no effect on majority"),
        ("majority", {"choose": "vote"}, "choose", "which takes a vote of its own"),
        ("self-refine", {"choose": "vote"}, "choose", "which evaluates no solutions"),
        ("best-of-n", {"step_stop": "."}, "step_stop", "which draws whole solutions"),
        ("majority", {"step_tokens": 9}, "step_tokens", "which draws whole solutions"),
        ("sample", {"width": 3}, "width", "which draws one solution if the task cannot check"),
        ("majority", {"answer": "poem"}, "answer", "answer must be one of text, number, letter"),
        ("beam", {"choose": 3}, "choose", "choose must be one of best, vote"),
        ("beam", {"step_tokens": 0}, "step_tokens", "step_tokens must be at least 1"),
        ("beam", {"step_stop": ""}, "step_stop", "a string of up to 100 characters"),
        ("beam", {"propose": "list"}, None, "method beam has no option 'propose'"),
        ("beam", {"model": "/etc/passwd"}, None, "method beam has no option 'model'"),
        ("beam", {"batch": 3}, None, "method beam has no option 'batch'"),
        ("mcts", {"batch": 0}, "batch", "batch cannot be used"),
        ("mcts", {"batch": {"a": 1}}, "batch", "batch cannot be used"),
        ("mcts", {"batch": "x" * 9_999}, "batch", r"got 'x{100,300}$"),
        ("mcts", {"virtual": "gain"}, "virtual", "one of loss, visit"),
        ("mcts", {"exploration": -1}, "exploration", "exploration must be at least 0"),
        ("self-refine", {"rounds": 10**9}, "rounds", "rounds must be at most 2,000"),
    ],
)
def test_options_are_checked(
    searches: ChatSearches,
    method: str,
    options: Mapping[str, Any],
    parameter: str | None,
    message: str,
) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as raised:
        prepare(searches, method, options)
    assert raised.value.parameter == parameter


def test_temperature_0_is_for_methods_that_draw_once(searches: ChatSearches) -> None:
    greedy = SamplingParams(temperature=0)
    how: Any = {"params": greedy, "budget": BUDGET, "question": "", "instruction": str}
    for method, options in (("self-refine", {}), ("sample", {}), ("beam", {"expand": 1})):
        assert searches.prepare(method, options, **how).budget == BUDGET
    for method in ("beam", "best-of-n", "ab-mcts"):
        with pytest.raises(InputError, match="use a temperature above 0"):
            searches.prepare(method, {}, **how)


@pytest.mark.parametrize(
    ("step_stop", "stop", "before", "text"),
    [
        ("\n", ("\n\n",), ("\n\n", "\n\n\n", "\n"), "one\n\n"),
        (".", ("\n",), ("\n", ".\n", "."), "one.\n"),
        ("a\n", ("\n\n",), ("\n\n", "a\n\n", "a\n\n\n", "a\n"), "a\n\n"),
        ("\n\n", ("\n", "END"), ("\n", "END", "\n\n", "\n\n\n", "\n\nEND"), "one\n\nEND"),
    ],
)
def test_stop_strings_of_a_reply_come_before_those_of_steps(
    searches: ChatSearches,
    step_stop: str,
    stop: tuple[str, ...],
    before: tuple[str, ...],
    text: str,
) -> None:
    search = prepare(searches, "beam", {"step_stop": step_stop}, stop=stop)
    step = search._settings.step
    assert set(step.stops) == set(before) and step.stops[: len(stop)] == stop
    # Of the strings that start first, the first in order ends the text.
    places = [(text.find(end), order) for order, end in enumerate(step.stops) if end in text]
    assert any(end in step.stops[min(places)[1]] for end in stop)


def test_a_token_that_completes_both_stop_strings_ends_the_reply(searches: ChatSearches) -> None:
    # For the demo model, a blank line is a single token.
    llm = LLM("demo", device="cpu", memory="16MiB", check=False)
    assert len(llm.tokenizer.encode("\n\n", add_special_tokens=False)) == 1
    options = {"step_stop": "\n", "width": 2, "expand": 2}
    search = prepare(searches, "beam", options, Budget(tokens=400), stop="\n\n", max_tokens=64)
    (result,) = llm.search(search, [("chat", STEPS)], search.params, budget=search.budget)
    assert result.candidates and not result.stopped
    for node in result.candidates:
        assert result.tree.path_text(node).endswith("\n\n")
        assert "\n\n" not in search.text(result.tree, node)


@pytest.mark.parametrize("stop", ["b\nc", "\nc"])
def test_a_stop_string_may_span_steps(searches: ChatSearches, stop: str) -> None:
    search = prepare(searches, "beam", {"step_stop": "\n"}, stop=stop)
    task: Any = search._task
    problem: Any = None
    assert not task.done(problem, "a b\n")
    assert task.done(problem, "a b\nc d\n")
    assert task.answer(problem, "a b\nc d\n") == task.answer(problem, "a b\nc d\n".split(stop)[0])
