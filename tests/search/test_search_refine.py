"""Self-refine, LATS and mutual checking against their papers' rules, written slowly."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from toy_search import MODEL, at_length, find, run, start, table, texts

from treegen.errors import InputError
from treegen.prompts.plan.draws import row_seed
from treegen.search.budget import Budget
from treegen.search.evaluate import by_function
from treegen.search.propose import Step
from treegen.search.strategies.beam import beam
from treegen.search.strategies.lats import lats
from treegen.search.strategies.mutual import mutual
from treegen.search.strategies.refine import answer_after, self_refine
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


def fake(salt: object, text: str, letters: str = "abc") -> str:
    """What a deterministic model says after a text."""
    return random.Random(f"{salt}/{text}").choice(letters)


# Self-refine


def slow_refine(salt: object, rounds: int) -> list[str]:
    """The paper's algorithm over texts; the attempts in their order."""
    history = fake(salt, "")
    attempts = [history]
    for _ in range(rounds):
        history += fake(salt, history, "cxx")
        if history.endswith("c"):
            break
        history += fake(salt, history)
        attempts.append(history)
    return attempts


@pytest.mark.parametrize("salt", range(8))
def test_attempts_follow_feedback_until_it_is_enough(salt: int) -> None:
    def say(letters: str) -> Callable[[SearchNode], Any]:
        async def ask(node: SearchNode) -> SearchNode:
            return node.extend(fake(salt, node.path_text, letters))

        return ask

    async def search(root: SearchNode) -> SearchOutcome:
        enough = lambda attempt: attempt.text == "c"  # noqa: E731
        return await self_refine(root, say("abc"), say("cxx"), say("abc"), enough, rounds=4)

    found = find(search)
    assert texts(found.candidates) == slow_refine(salt, 4)[::-1]
    assert found.best is found.candidates[0]


def test_chains_end_with_the_budget_and_the_last_attempts_come_first() -> None:
    say = answer_after("b", stop=(), max_tokens=2)

    async def search(root: SearchNode) -> SearchOutcome:
        return await self_refine(
            root,
            answer_after("", stop=(), max_tokens=3),
            say,
            say,
            lambda _: False,
            rounds=9,
            chains=3,
        )

    problem, _ = start(MODEL, budget=Budget(calls=11))
    result = run(problem, search)
    depths = [result.tree.nodes[node].depth for node in result.candidates]
    assert depths == [5, 5, 1, 1, 1] or depths == [5, 5, 5, 1, 1, 1]
    assert result.stopped == "budget of 11 calls reached"
    assert {len(result.tree.nodes[node].text) for node in result.candidates} == {2, 3}


# LATS


class SlowLats:
    """The paper's algorithm over texts."""

    def __init__(self, salt: object, depth: int, c: float) -> None:
        self.salt, self.depth, self.c = salt, depth, c
        self.visits: dict[str, int] = {"": 0}
        self.value: dict[str, float] = {"": 0.0}
        self.children: dict[str, list[str]] = {}
        self.lessons: list[str] = []
        self.ends: list[str] = []
        self.log: list[tuple[str, tuple[str, ...]]] = []

    def play(self) -> bool:
        text, way = "", [""]
        while len(text) < self.depth:
            if text not in self.children:
                self.log.append((text, tuple(self.lessons)))
                self.children[text] = next_texts(self.salt, text, self.lessons)
                for child in self.children[text]:
                    self.visits[child] = 0
                    self.value[child] = guess(self.salt, child, self.lessons)
            going = [child for child in self.children[text] if not self.is_used_up(child)]
            new = [child for child in going if self.visits[child] == 0]
            if new:
                text = max(new, key=lambda child: self.value[child])
            else:
                number = self.visits[text]
                text = max(
                    going,
                    key=lambda child: (
                        self.value[child]
                        + self.c * math.sqrt(math.log(number) / self.visits[child])
                    ),
                )
            way.append(text)
        reward = worth(self.salt, text)
        self.ends.append(text)
        for each in way:
            self.visits[each] += 1
            n = self.visits[each]
            self.value[each] = (self.value[each] * (n - 1) + reward) / n
        if reward >= 1:
            return True
        self.lessons = [*self.lessons, f"not {text}"][-2:]
        return False

    def is_used_up(self, text: str) -> bool:
        if len(text) == self.depth:
            return text in self.ends
        below = self.children.get(text)
        return below is not None and all(map(self.is_used_up, below))


def next_texts(salt: object, text: str, lessons: Sequence[str]) -> list[str]:
    drawn = random.Random(f"{salt}{text}{list(lessons)}").sample("abcd", 3)
    return [text + letter for letter in drawn]


def guess(salt: object, text: str, lessons: Sequence[str]) -> float:
    return random.Random(f"g{salt}{text}{list(lessons)}").random()


def worth(salt: object, text: str) -> float:
    number = random.Random(f"w{salt}{text}").random()
    return 1.0 if number > 0.97 else number / 2


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("salt", range(4))
def test_lats_plays_and_learns_as_its_paper_says(salt: int, depth: int) -> None:
    slow = SlowLats(salt, depth, 0.7)
    for _ in range(12):
        if depth == 2 and len(slow.ends) == 9:
            break
        if slow.play():
            break
    log: list[tuple[str, tuple[str, ...]]] = []
    ends: list[str] = []

    async def propose(node: SearchNode, lessons: Sequence[str]) -> list[SearchNode]:
        log.append((node.path_text, tuple(lessons)))
        return [node.extend(text[-1]) for text in next_texts(salt, node.path_text, lessons)]

    async def evaluate(nodes: Sequence[SearchNode], lessons: Sequence[str]) -> list[float]:
        return [guess(salt, node.path_text, lessons) for node in nodes]

    async def reward(nodes: Sequence[SearchNode]) -> list[float]:
        return [worth(salt, node.path_text) for node in nodes]

    async def reflect(node: SearchNode, value: float) -> str:
        assert value == worth(salt, node.path_text)
        ends.append(node.path_text)
        return f"not {node.path_text}"

    async def search(root: SearchNode) -> SearchOutcome:
        return await lats(
            root,
            propose,
            evaluate,
            at_length(depth),
            reward,
            reflect,
            iterations=12,
            depth=depth,
            c=0.7,
            num_lessons=2,
        )

    found = find(search)
    assert log == slow.log
    assert ends == [text for text in slow.ends if worth(salt, text) < 1]
    assert found.best is not None
    values = {node.path_text: node.value for node in found.best.search.nodes() if node.depth}
    for text, number in slow.visits.items():
        if number and text:
            assert values[text] == pytest.approx(slow.value[text])
    ranked = sorted(slow.ends, key=lambda text: worth(salt, text), reverse=True)
    assert texts(found.candidates) == ranked and found.best is found.candidates[0]


# Mutual checking


def completing(salt: object, length: int, log: list[str]) -> Step:
    """Completes texts as another deterministic model would."""

    async def complete(node: SearchNode, n: int) -> list[SearchNode]:
        log.append(node.path_text)
        ends = []
        for index in range(n):
            text = node.path_text
            while len(text) < length:
                text += fake(f"{salt}{index}", text, "ab")
            ends.append(node.extend(text[len(node.path_text) :]))
        return ends

    return complete


@pytest.mark.parametrize("checks", [1, 3])
@pytest.mark.parametrize("salt", range(5))
def test_mutual_checking_ranks_as_its_paper_says(salt: int, checks: int) -> None:
    """Texts of five letters; the answer is the last one, and "c" is none."""
    log: list[str] = []

    def answer_of(text: str) -> str | None:
        return None if text.endswith("c") else text[-1]

    async def propose(node: SearchNode) -> list[SearchNode]:
        return [node.extend(letter) for letter in "abc"]

    def value(text: str) -> float:
        return random.Random(f"{salt}{text}").random()

    async def search(root: SearchNode) -> SearchOutcome:
        found = await beam(
            root,
            propose,
            by_function(lambda node: value(node.path_text)),
            at_length(5),
            width=12,
            depth=5,
        )
        before.extend(texts(found.candidates))
        complete = completing(salt, 5, log)
        return await mutual(found, lambda node: answer_of(node.path_text), complete, checks=checks)

    before: list[str] = []
    found = find(search)
    # The rule, over texts.
    answered = [text for text in before if answer_of(text) is not None]
    cuts, confirmed = [], []
    for text in answered:
        node = next(each for each in found.candidates if each.path_text == text)
        cut = random.Random(row_seed(None, f"{node.key}", 0)).randint(1, 4)
        cuts.append(text[:cut])
        same = 0
        for index in range(checks):
            other = text[:cut]
            while len(other) < 5:
                other += fake(f"{salt}{index}", other, "ab")
            same += answer_of(other) == answer_of(text)
        if same / checks >= 0.5:
            confirmed.append(text)
    assert log == cuts

    def score(text: str) -> float:
        alike = [each for each in answered if answer_of(each) == answer_of(text)]
        return value(text) * len(alike) / len(answered)

    first = sorted(confirmed, key=score, reverse=True)
    then = sorted((text for text in answered if text not in confirmed), key=score, reverse=True)
    rest = [text for text in before if text not in answered]
    assert texts(found.candidates) == [*first, *then, *rest]
    assert list(found.answers) == [answer_of(text) for text in texts(found.candidates)]


def test_whole_solutions_are_checked_from_the_prompt_and_short_ones_in_their_middle() -> None:
    log: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        ends = [root.extend("aa"), root.extend("b").extend("a")]
        return await mutual(
            SearchOutcome(None, tuple(ends)), lambda node: "x", completing(1, 2, log)
        )

    find(search)
    assert log == ["", "b"]


def test_a_budget_that_ends_the_checks_leaves_an_order() -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        found = await beam(root, prompted_steps, table({}, 0.5), at_length(4), width=4, depth=2)
        return await mutual(found, lambda node: node.path_text[-1], whole)

    async def prompted_steps(node: SearchNode) -> list[SearchNode]:
        return await node.sample(4, stop=(), max_tokens=2)

    async def whole(node: SearchNode, n: int) -> list[SearchNode]:
        return await node.sample(n, stop=(), max_tokens=2)

    problem, _ = start(MODEL, budget=Budget(calls=7))
    result = run(problem, search)
    assert result.stopped == "budget of 7 calls reached" and len(result.candidates) == 4
    with pytest.raises(InputError, match="low and high must be between 0 and 1"):
        find(lambda root: mutual(SearchOutcome(None), lambda _: None, whole, low=0.9, high=0.1))
    for agree in (-0.1, 2.0):
        with pytest.raises(InputError, match="agree must be between 0 and 1"):
            asyncio.run(mutual(SearchOutcome(None), lambda _: None, whole, agree=agree))


def test_a_share_of_checks_that_equals_the_limit_confirms() -> None:
    """0.28 * 25 is more than 7 in floating-point numbers."""

    async def complete(node: SearchNode, n: int) -> list[SearchNode]:
        return [node.extend(letter) for letter in "b" * 7 + "c" * (n - 7)]

    async def search(root: SearchNode) -> SearchOutcome:
        ends = SearchOutcome(None, tuple(root.extend(letter) for letter in "ab"))
        return await mutual(ends, lambda node: node.text, complete, checks=25, agree=0.28)

    assert texts(find(search).candidates) == ["b", "a"]
