"""Places of live worlds, results with images, and budgets of actions."""

import asyncio
import contextlib
import random
import threading
from typing import Any

import pytest
from agent_cases import TOOLS, machines, policy, search, turns

from treegen.prompts.replies.types import Reply, ToolCall
from treegen.search.budget import Budget
from treegen.search.environments import worlds as live_worlds
from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import render_outcome
from treegen.search.environments.protocol import Observation, Traits
from treegen.search.environments.states import Outcome
from treegen.search.environments.worlds import LiveWorlds
from treegen.search.strategies.beam import dvts
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


class SlowToClose:
    """An environment, and its only kind of world, which takes a while to close."""

    traits, tools = Traits(has_snapshots=True), TOOLS

    def __init__(self) -> None:
        self.is_closing = threading.Event()

    async def start(self, problem: object) -> Any:
        return self

    async def restore(self, snapshot: str) -> Any:
        return self

    async def delete(self, snapshot: str) -> None: ...

    async def run(self, action: ToolCall) -> Observation:
        return Observation(text="over", is_done=True, reward=1.0)

    async def observe(self) -> Observation:
        return Observation()

    async def snapshot(self) -> str:
        return "s"

    async def close(self) -> None:
        self.is_closing.set()
        await asyncio.sleep(0.2)


def test_a_call_that_is_cancelled_while_its_world_closes_gives_its_place_back() -> None:
    environment = SlowToClose()
    with LiveWorlds(environment, max_live=1, max_seconds=20) as worlds:
        state = worlds.start(None)
        state.result(20)
        outcome = worlds.run(state, [ToolCall("left", {})], is_last=True)
        assert environment.is_closing.wait(20)
        worlds.cancel(outcome, state)
        worlds.start(None).result(20)
        assert worlds.usage.live == 1


class Deaf(SlowToClose):
    """An environment whose observations end only when it is closed, even if they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_observing = threading.Event()

    async def observe(self) -> Observation:
        self.is_observing.set()
        while not self.is_closing.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return Observation()


def test_an_environment_is_closed_while_a_call_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_worlds, "_CLOSING_SECONDS", 0.1)
    environment = Deaf()
    worlds = LiveWorlds(environment, max_live=1, max_seconds=60)
    worlds.observe(worlds.start(None))
    assert environment.is_observing.wait(20)
    closing = threading.Thread(target=worlds.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert environment.is_closing.is_set()


@pytest.mark.parametrize("texts", [("", ""), ("t", "tool"), ("state 3", "")])
def test_images_stand_after_their_own_texts(texts: tuple[str, ...]) -> None:
    calls = [ToolCall("look", {}), ToolCall("look", {"by": 1})]
    shown = tuple(Observation(text=text, images=(text.encode(), b"i")) for text in texts)
    sample: Any = type("Sample", (), {"stop": None})()
    marked = render_outcome(turns(), Reply("", calls), Outcome(shown), sample)
    plain = tuple(Observation(text=text) for text in texts)
    whole = render_outcome(turns(), Reply("", calls), Outcome(plain), sample)
    assert isinstance(marked, list) and isinstance(whole, str)
    assert "".join(part["text"] for part in marked if part["type"] == "text") == whole
    assert [part["type"] for part in marked] == ["text", "image", "image"] * 2 + ["text"]
    for place, text in enumerate(texts):
        assert marked[3 * place]["text"].endswith(text)
        assert marked[3 * place + 1]["image"] == text.encode()


def test_a_budget_of_actions_cuts_parallel_subtrees_at_the_same_nodes() -> None:
    def run(salt: int, shuffle: random.Random | None) -> list[Any]:
        environment, _ = machines(salt)

        async def by_dvts(root: SearchNode) -> SearchOutcome:
            agent.begin(root, 0)
            return await dvts(
                root, agent.propose(2), agent.evaluate, agent.done, subtrees=3, depth=8
            )

        with Agent(environment, turns=turns(), max_live=3) as agent:
            (result,) = search(by_dvts, policy(salt), budget=Budget(actions=15), shuffle=shuffle)
        assert result.usage.actions <= 15
        reasons.append(result.stopped)
        return [(node.text, node.score, node.pruned_because) for node in result.tree.nodes]

    reasons: list[str] = []
    for salt in range(6):
        want = run(salt, None)
        for seed in range(3):
            assert run(salt, random.Random(seed)) == want
    assert reasons.count("budget of 15 actions reached") > 8
