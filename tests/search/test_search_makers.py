"""Ways to propose and to evaluate, and waiting for several of them."""

import asyncio
import math
import operator
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from toy_search import ToyModel, find, hashed, run, run_all, start

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.search.budget import Budget, BudgetReached
from treegen.search.evaluate import (
    along_path,
    by_function,
    choice_scores,
    read_choice,
    rollouts,
    value_prompt,
    vote_prompt,
)
from treegen.search.event_loop import gather
from treegen.search.propose import combine_proposers, lines, propose_lines, sample_steps
from treegen.search.tree.node import SearchNode, is_ended

T = TypeVar("T")
MODEL = hashed("abc.")


def at_root(fn: Callable[[SearchNode], Awaitable[T]], model: ToyModel = MODEL, **options: Any) -> T:
    return find(fn, model, **options)


def certain(text: str, letters: str = "abc.") -> ToyModel:
    """A model that writes a text after any prompt in capitals or digits, and then ends."""

    def weights(context: str) -> list[float]:
        written = len(context) - len(context.rstrip(letters))
        letter = text[written] if written < len(text) else None
        return [float(letter is None), *(float(each == letter) for each in letters)]

    return ToyModel(letters, weights)


# Proposals


def test_sampled_steps_end_with_their_delimiter() -> None:
    steps = at_root(sample_steps(8, ".", max_tokens=200))
    assert len(steps) == 8
    assert all(step.text.endswith(".") and step.text.count(".") == 1 for step in steps)
    assert all(step.finish_reason == "stop" and not is_ended(step) for step in steps)


def test_steps_of_a_number_of_tokens() -> None:
    steps = at_root(sample_steps(4, (), max_tokens=7))
    assert [len(step.text) for step in steps] == [7] * 4


def test_no_step_follows_the_end_of_the_text() -> None:
    async def fn(root: SearchNode) -> None:
        propose = sample_steps(2, ".")
        (end,) = await root.sample(1)
        assert is_ended(end) and await propose(end) == []
        assert await propose_lines(lambda node: "P")(end) == []

    at_root(fn, certain("ab"))


def test_listed_steps_are_appended_once_each() -> None:
    async def fn(root: SearchNode) -> None:
        propose = propose_lines(
            lambda node: f"P{node.path_text}", lambda text, node: text.split(".")
        )
        steps = await propose(root)
        assert [step.text for step in steps] == ["ab", "c", ""]
        assert steps == root.children and all(step.finish_reason == "given" for step in steps)
        # The question was dropped and is no part of the tree.
        assert len(root.search.nodes()) == 4
        assert root.search.usage.nodes == 4

    search, backend = start(certain("ab.c.ab."))
    run(search, fn)
    assert len(backend.live) == 4 and backend.calls == ["P"]


def test_lines_keep_what_says_something() -> None:
    assert lines(" a \n\n\t\nb\r\n c") == ["a\n", "b\n", "c\n"]


def test_either_way() -> None:
    async def fn(root: SearchNode) -> list[str]:
        listed = propose_lines(lambda node: "P", lambda text, node: [text])
        sampled = sample_steps(2, (), max_tokens=1)
        return [step.text for step in await combine_proposers(listed, sampled)(root)]

    assert at_root(fn, certain("ab")) == ["ab", "a", "a"]


@pytest.mark.parametrize("n", [0, -3, 1.0, True])
def test_numbers_of_steps_are_checked(n: Any) -> None:
    for make in (sample_steps, lambda n: propose_lines(lambda node: "", n=n)):
        with pytest.raises(InputError, match=r"n must be (an integer|at least 1)"):
            make(n)


# Evaluations


def letters_of(root: SearchNode) -> list[SearchNode]:
    return [root.extend(letter) for letter in "aba"]


def test_values_by_prompt_are_means_asked_once_per_question() -> None:
    async def fn(root: SearchNode) -> list[float]:
        evaluate = value_prompt(
            lambda node: f"V{node.text}", lambda text: text.count("a"), n=5, max_tokens=9
        )
        nodes = letters_of(root)
        values = list(await evaluate(nodes))
        assert values == list(await evaluate(nodes))
        assert root.search.usage.calls == 2 and len(root.search.nodes()) == 4
        for node, value in zip(nodes, values, strict=True):
            again = root.search.prompt(f"V{node.text}", key="another")
            samples = await again.sample(5, max_tokens=9)
            assert len(samples) == 5 and 0 <= value <= 9
        assert await evaluate([]) == []
        return values

    values = at_root(fn)
    assert values[0] == values[2]
    assert values == at_root(fn)
    assert values != at_root(fn, params=SamplingParams(seed=7))


@pytest.mark.parametrize("budget", [None, Budget(tokens=1_000)])
def test_parts_side_by_side_ask_a_question_once(budget: Budget | None) -> None:
    def ask(text: str) -> float:
        return text.count("a")

    prompts = value_prompt(lambda node: f"V{node.text}", ask, n=3, max_tokens=9)
    choices = choice_scores(lambda node: f"V{node.text}", {"a": 1.0, "b": 0.0})

    async def fn(root: SearchNode) -> list[list[float]]:
        first, second, third = letters_of(root)
        for evaluate in (prompts, choices):
            calls = root.search.usage.calls
            parts = [evaluate([first, second]), evaluate([second]), evaluate([third, second])]
            found = list(map(list, await gather(parts)))
            assert root.search.usage.calls - calls == 2
            assert found == [
                list(await evaluate(n)) for n in ([first, second], [second], [third, second])
            ]
        return found

    run(start(MODEL, budget=budget)[0], fn)


def test_a_question_whose_asker_is_cancelled_is_asked_by_another_part() -> None:
    evaluate = value_prompt(lambda node: "V", lambda text: text.count("a"), n=3, max_tokens=9)

    async def fn(root: SearchNode) -> None:
        first, second = (asyncio.ensure_future(evaluate([root])) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        values = await second
        assert first.cancelled() and values == await evaluate([root])
        assert root.search.usage.calls == 2

    run(start(MODEL)[0], fn)


def test_a_value_prompt_made_once_serves_searches_apart() -> None:
    evaluate = value_prompt(lambda node: "V", lambda text: text.count("a"), n=9, max_tokens=9)

    async def fn(root: SearchNode) -> float:
        return (await evaluate([root]))[0]

    names = [str(index) for index in range(6)]
    together = run_all([start(MODEL, name=name)[0] for name in names], fn)
    apart = [run(start(MODEL, name=name)[0], fn) for name in names]
    assert [each.value for each in together] == [each.value for each in apart]
    assert len({each.value for each in together}) > 1


def test_choices_are_weighted_by_their_probabilities() -> None:
    chances = {"a": 0.2, "b": 0.5, "c": 0.1, ".": 0.2}
    model = ToyModel("abc.", lambda text: [0.0, *chances.values()])

    async def fn(root: SearchNode) -> Sequence[float]:
        evaluate = choice_scores(lambda node: "V", {"a": 20.0, "bb": 1.0, "c": 0.0})
        return await evaluate([root, root])

    values = at_root(fn, model)
    expected = (0.2 * 20 + 0.25 * 1) / (0.2 + 0.25 + 0.1)
    assert values == pytest.approx([expected, expected])
    with pytest.raises(InputError, match="at least one answer"):
        choice_scores(lambda node: "V", {})


def test_votes_are_shares() -> None:
    async def fn(root: SearchNode) -> None:
        nodes = letters_of(root)
        evaluate = vote_prompt(
            lambda nodes: "V" + "".join(node.text for node in nodes),
            lambda text, num: {"a": 1, "b": 2}.get(text),
            n=40,
            max_tokens=1,
        )
        values = await evaluate(nodes)
        assert values[2] == 0 and 0 < values[0] < 1 and sum(values) < 1
        assert values == await evaluate(nodes)
        assert all((value * 40) % 1 == 0 for value in values)
        assert await evaluate(nodes[:1]) == [1.0]
        assert root.search.usage.calls == 2

    at_root(fn, ToyModel("abc.", lambda text: [0.0, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("text", "num", "choice"),
    [
        ("... so the best choice is 2", 3, 2),
        ("The best choice is 12", 12, 12),
        ("The best choice is 12", 5, None),
        ("The best choice is 1, since choice 3 is wrong", 3, 1),
        ("The best choice is 1. No: the Best Choice is: **3**", 3, 3),
        ("2", 3, 2),
        ("Choice 2.", 3, 2),
        ("1 or 2", 3, None),
        ("the best choice is 0", 3, None),
        ("The best choice is not 2 but 3", 3, None),
        ("The best choice isn't 2. The best choice is 3", 3, 3),
        ("The best choice is 2 or 3", 3, None),
        ("The best choice is 2.5", 3, None),
        ("none of them", 3, None),
        ("", 3, None),
        ("the best choice is " + "9" * 10_000, 3, None),
        ("best choice is " * 5_000, 3, None),
    ],
)
def test_reading_a_choice(text: str, num: int, choice: int | None) -> None:
    assert read_choice(text, num) == choice


def test_rollouts_value_their_ends() -> None:
    def done(node: SearchNode) -> bool:
        return len(node.path_text) >= 3

    async def fn(root: SearchNode) -> None:
        near, far = root.extend("abc"), root.extend("a")
        evaluate = rollouts(
            6, done, by_function(lambda node: node.path_text.count("a")), max_tokens=2
        )
        values = await evaluate([near, far])
        assert values[0] == 1 and near.is_leaf and near.value is None
        assert len(far.children) == 6
        ends = [end.value for end in far.children]
        assert ends == [end.path_text.count("a") for end in far.children]
        assert values[1] == sum(end for end in ends if end is not None) / 6

    search, backend = start(MODEL)
    run(search, fn)
    assert len(backend.live) == 3


@pytest.mark.parametrize(("combine", "expected"), [(min, 0.2), (operator.mul, 0.05)])
def test_values_along_a_path(combine: Callable[[float, float], float], expected: float) -> None:
    async def fn(root: SearchNode) -> None:
        first = root.extend("a")
        tool = first.extend("b")  # no step, so without a value
        second = tool.extend("c")
        evaluate = along_path(by_function(lambda node: {"a": 0.2, "c": 0.25}[node.text]), combine)
        (first.value,) = await evaluate([first])
        assert first.value == 0.2
        assert await evaluate([second]) == pytest.approx([expected])

    at_root(fn)


# Waiting for several


def test_gather_keeps_the_order() -> None:
    async def after(rounds: int) -> int:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return rounds

    async def fn(root: SearchNode) -> list[int]:
        assert await gather([]) == []
        return await gather(after(n) for n in (5, 0, 3))

    assert at_root(fn) == [5, 0, 3]


def test_gather_cancels_the_others_when_one_fails() -> None:
    ended_well: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(60)
        ended_well.append("slow")

    async def bad(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    async def fn(root: SearchNode) -> None:
        with pytest.raises(ValueError, match="first"):
            await gather([slow(), bad(ValueError("first")), bad(ValueError("second"))])
        assert len(asyncio.all_tasks()) == 1

    at_root(fn)
    assert ended_well == []


def test_gather_waits_for_all_when_a_budget_is_reached() -> None:
    async def fn(root: SearchNode) -> None:
        calls = [root.sample(1, max_tokens=length) for length in (2, 9, 30)]
        with pytest.raises(BudgetReached, match="budget of 2 calls"):
            await gather(calls)
        assert sorted(len(child.text) for child in root.children) == [2, 9]

    at_root(fn, budget=Budget(calls=2))


def test_gather_that_is_cancelled_leaves_nothing_behind() -> None:
    async def fn(root: SearchNode) -> None:
        waiting = gather(asyncio.sleep(60) for _ in range(3))
        task = asyncio.create_task(waiting)
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    at_root(fn)


def test_samples_follow_the_model() -> None:
    """The toy itself: frequencies of all continuations against their listed probabilities."""
    model = hashed("ab", eos=0.2, salt=random.random())
    ways = dict(model.continuations("", 3))
    assert math.fsum(ways.values()) == pytest.approx(1)

    async def fn(root: SearchNode) -> list[str]:
        return [child.text for child in await root.sample(4000, max_tokens=3)]

    seen = at_root(fn, model)
    for text, chance in ways.items():
        spread = math.sqrt(chance * (1 - chance) / 4000)
        assert (
            abs(seen.count(text) / 4000 - chance) < 6 * spread + 5 / 4000
        )  # rare texts are far from normal
