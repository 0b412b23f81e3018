"""Environments that fail: a failure ends its branch or is an error, and is never a normal end."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest
from agent_cases import TOOLS, Machine, call_text, machines, policy, search, turns

from treegen.common.params import SamplingParams
from treegen.errors import InputError, StoppedError, WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.ask_tell import AskTell, SampleRequest
from treegen.search.budget import Budget
from treegen.search.environments.agent import Agent
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Observation, Traits
from treegen.search.environments.replay import ReplayEnvironment
from treegen.search.strategies.beam import beam
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.rebase import rebase
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


def two_ways(context: str, seed: int) -> str:
    """Goes left or right, by the seed."""
    return call_text(ToolCall("left" if seed % 2 else "right", {"by": 1}))


class Fragile(Machine):
    """A machine whose action `left` fails in the way of `how`."""

    how = ""

    def run(self, action: ToolCall) -> Any:
        if action.name != "left":
            return Observation(text="fine", reward=0.5)
        if self.how == "raises":
            raise ValueError("the wheel\n came off")
        if self.how == "stops":
            raise StopIteration
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "cancels":
            raise CancelledError
        if self.how == "times out":
            raise TimeoutError("no reply from the crane")
        if self.how == "text":
            return 17
        if self.how == "reward":
            return Observation(text="fine", reward=float("nan"))
        if self.how == "flag":
            return Observation(text="fine", is_done="yes")  # type: ignore[arg-type]
        if self.how == "image":
            return Observation(text="fine", images=("a.png",))  # type: ignore[arg-type]
        if self.how == "says so":
            return Observation(text="half of it", failure="the disk is full")
        threading.Event().wait(60)
        raise AssertionError

    def fork(self) -> "Fragile":
        return self.__class__(self.salt, self.ran)


def fragile(how: str) -> MemoryEnvironment:
    kind = type("Kind", (Fragile,), {"how": how})
    return MemoryEnvironment(lambda problem: kind(0), TOOLS)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "ValueError: the wheel came off"),
        ("stops", "StopIteration"),
        ("exits", "SystemExit: 3"),
        ("cancels", "CancelledError"),
        ("times out", "TimeoutError: no reply from the crane"),
        ("text", "the environment returned 17, which is not an Observation"),
        ("reward", "the environment returned an Observation whose reward is nan"),
        ("flag", "the environment returned an Observation whose is_done is 'yes'"),
        ("image", "the environment returned an Observation whose images is ('a.png',)"),
        ("says so", "the disk is full"),
        ("hangs", "the action left took more than 0.3 seconds"),
    ],
)
def test_a_failed_action_ends_its_branch_only(how: str, said: str) -> None:
    async def fn(root: SearchNode) -> SearchOutcome:
        agent.begin(root)
        return await beam(
            root, agent.propose(6), agent.evaluate, agent.done, width=4, depth=2, state=agent.state
        )

    with Agent(fragile(how), turns=turns(), max_seconds=0.3) as agent:
        (result,) = search(fn, two_ways)
    assert agent.usage.live == agent.usage.stored == 0
    failed = [node for node in result.tree.nodes if node.pruned_because.startswith("failed")]
    assert failed and {node.pruned_because for node in failed} == {f"failed: {said}"}
    for node in failed:
        assert isinstance(node.data, dict)
        assert node.data["end"] == "failed" and node.data["failure"] == said
        assert node.score is None and node.leaf
    going = [node for node in result.tree.nodes if node.score is not None]
    assert going and not result.candidates


@pytest.mark.parametrize("instructs", [False, True])
def test_a_world_that_cannot_start_is_an_error_of_the_search(instructs: bool) -> None:
    def make(problem: Any) -> Machine:
        if problem == "0":
            raise OSError("no such image")
        return Machine(0)

    async def fn(root: SearchNode) -> SearchNode:
        node = agent.begin(root, root.search.name)
        if instructs:
            node = agent.instruct(node, "Be quick.")
        (child,) = await agent.act(node)
        return child

    with Agent(MemoryEnvironment(make, TOOLS), turns=turns()) as agent:
        searches = AskTell(fn, ["a", "b"], SamplingParams(seed=1))
        while not searches.done:
            for request in searches.ask():
                assert request.search != "0"  # nothing is sampled without a world
                searches.tell(request, [two_ways("", 2)])
        bad, good = searches.results
    assert bad is not None and bad.best is None
    assert re.fullmatch(
        r"OSError: no such image \(test_agent_failures\.py:\d+, in \w+\)", bad.error or ""
    )
    assert good is not None and good.error is None and good.best is not None


@pytest.mark.filterwarnings("ignore:all 2 searches failed")
@pytest.mark.parametrize("why", ["search ends", "search fails", "takes too long"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_world_that_starts_too_late_is_closed(why: str, is_async: bool) -> None:
    may_end, closed = threading.Event(), threading.Semaphore(0)

    class Late(Machine):
        def close(self) -> Any:
            if not is_async:
                closed.release()
                return None

            async def close() -> None:
                closed.release()

            return close()

    def make(problem: Any) -> Machine:
        assert may_end.wait(60)
        return Late(0)

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        if why == "search fails":
            raise ValueError("no")
        if why == "takes too long":
            await agent.act(root)

    with Agent(MemoryEnvironment(make, TOOLS), turns=turns(), max_seconds=0.2) as agent:
        searches = AskTell(fn, ["a", "b"], SamplingParams(seed=1))
        assert not searches.ask() and searches.done
        if why == "takes too long":
            for result in searches.results:
                assert result is not None and result.error is not None
                assert "starting a world took more than 0.2 seconds" in result.error
    may_end.set()
    assert closed.acquire(timeout=30) and closed.acquire(timeout=30)
    assert not closed.acquire(timeout=0.2)  # each of them once


class NoCopies(Machine):
    def fork(self) -> Machine:
        raise OSError("disk full")


def test_a_state_that_cannot_be_forked_ends_its_branches() -> None:
    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        assert await agent.act(root, 8) == []
        assert {child.pruned_because for child in root.children} <= {
            "failed: OSError: disk full",
            "failed: a state cannot be used: its world failed",
        }

    with Agent(MemoryEnvironment(lambda problem: NoCopies(0), TOOLS), turns=turns()) as agent:
        search(fn, two_ways)


class Blind(Machine):
    """A machine that cannot be observed after a step to the left, and gives no other rewards."""

    def run(self, action: ToolCall) -> Observation:
        self.state = len(self.steps) + 1
        self.steps.append(action.name)
        return Observation(text=f"went {action.name}")

    def observe(self) -> Observation:
        if "left" in self.steps:
            raise OSError("the network\n is down")
        return Observation(reward=0.5 if self.steps else -1.0)

    def fork(self) -> "Blind":
        return Blind(self.salt, self.ran, self.state, self.steps.copy())


UNSEEN = "failed: OSError: the network is down"


def answer_after_two(context: str, seed: int) -> str:
    return "An answer." if context.count("went") == 2 else two_ways(context, seed)


def strategy(method: str, agent: Agent) -> Callable[[SearchNode], Awaitable[SearchOutcome]]:
    steps, done, state = agent.propose(4), agent.done, agent.state
    runs: dict[str, Callable[[SearchNode], Awaitable[SearchOutcome]]] = {
        "beam": lambda root: beam(root, steps, agent.evaluate, done, width=4, depth=4, state=state),
        "rebase": lambda root: rebase(
            root, agent.step, agent.evaluate, done, width=6, depth=4, state=state
        ),
        "mcts": lambda root: mcts(root, steps, agent.evaluate, done, iterations=12, state=state),
        "best-of-n": lambda root: best_of_n(root, 6, agent.evaluate, play=agent.play, done=done),
    }
    return runs[method]


@pytest.mark.parametrize("method", ["beam", "rebase", "mcts", "best-of-n"])
def test_a_state_that_cannot_be_observed_ends_its_branch_only(method: str) -> None:
    async def fn(root: SearchNode) -> SearchOutcome:
        outcome = await strategy(method, agent)(agent.begin(root))
        for node in root.walk():
            if node.pruned_because.startswith("failed"):
                assert await agent.act(node) == [] == await agent.step(node, 2)
                assert not agent.done(node) and not node.is_live
        return outcome

    with Agent(MemoryEnvironment(lambda problem: Blind(0), TOOLS), turns=turns()) as agent:
        (result,) = search(fn, answer_after_two)
    assert agent.usage.live == agent.usage.stored == 0
    nodes = result.tree.nodes
    failed = {place for place, node in enumerate(nodes) if node.pruned_because == UNSEEN}
    assert failed
    for place in failed:
        data: Any = nodes[place].data
        assert nodes[place].pruned and nodes[place].leaf
        assert data["end"] == "failed" and data["failure"] == UNSEEN.removeprefix("failed: ")
    assert result.candidates and result.best is not None
    for end in result.candidates:
        path = result.tree.path(end)
        assert not failed & {*path} and nodes[end].score == 0.5
        assert not any("went left" in nodes[place].text for place in path)


def test_a_verifier_does_not_revive_a_state_that_cannot_be_observed() -> None:
    async def verify(nodes: Sequence[SearchNode]) -> list[float]:
        return [1.0] * len(nodes)

    async def fn(root: SearchNode) -> None:
        children = await agent.act(agent.begin(root), 6)
        values = await agent.evaluate_with(verify)(children)
        assert {node.pruned for node in children} == {False, True}
        for node, value in zip(children, values, strict=True):
            assert value == (0.0 if node.pruned else 0.75)

    with Agent(MemoryEnvironment(lambda problem: Blind(0), TOOLS), turns=turns()) as agent:
        search(fn, two_ways)


def test_a_root_that_cannot_be_observed_is_an_error() -> None:
    class Dark(Machine):
        def observe(self) -> Observation:
            raise OSError("dark")

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        with pytest.raises(WorldError, match=r"^OSError: dark$"):
            await agent.evaluate([root])
        with pytest.raises(WorldError, match="its world failed"):
            await agent.observe(root)

    with Agent(MemoryEnvironment(lambda problem: Dark(0), TOOLS), turns=turns()) as agent:
        search(fn, two_ways)


@pytest.mark.parametrize("ends", [False, True])
def test_a_world_of_its_own_that_cannot_start_ends_its_branch_only(ends: bool) -> None:
    def make(problem: Any) -> Machine:
        if problem == 1:
            raise OSError("no such image")
        return Machine(0)

    async def fn(root: SearchNode) -> list[SearchNode]:
        found = []
        for problem in range(3):
            branch = root.extend(f"World {problem}.")
            agent.begin(branch, problem)
            children = await agent.act(branch, 2)
            await agent.rewards(children)
            found += [child for child in children if not child.pruned]
        assert len(found) == 4
        failed = [node.pruned_because for node in root.walk() if node.pruned]
        assert failed == ["failed: OSError: no such image"] * 2
        return found

    reply = (lambda context, seed: "An answer.") if ends else two_ways
    with Agent(MemoryEnvironment(make, TOOLS), turns=turns()) as agent:
        search(fn, reply)
    assert agent.usage.live == agent.usage.stored == 0


def test_replies_that_were_cut_off_fail() -> None:
    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        assert await agent.act(root) == []
        assert root.children[0].pruned_because == "failed: the reply was cut off (length)"

    environment, ran = machines()
    with Agent(environment, turns=turns()) as agent:
        search(fn, lambda context, seed: call_text(ToolCall("left", {})) + " and" * 99)
    assert not ran


class Forgetful(Machine):
    """A machine that does something else each time."""

    times = 0

    def run(self, action: ToolCall) -> Observation:
        type(self).times += 1
        return Observation(text=f"time {self.times}")


def test_a_replay_that_differs_is_an_error_that_says_so() -> None:
    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        (node,) = await agent.act(root)
        children = await agent.act(node, 8)
        assert children
        failed = [child.pruned_because for child in node.children if child.pruned]
        assert failed
        assert all("shows 'time " in reason for reason in failed)
        assert all("when it runs again" in reason for reason in failed)

    environment = MemoryEnvironment(lambda problem: Forgetful(0), TOOLS)
    environment.traits = Traits(has_snapshots=False)
    with Agent(environment, turns=turns()) as agent:
        search(fn, two_ways)


async def world_name(environment: MemoryEnvironment) -> str:
    """The snapshot of a new world."""
    return await (await environment.start(None)).snapshot()


class Slow:
    """An object whose calls take time, and which must not be closed meanwhile."""

    def __init__(self) -> None:
        self.go_on, self.events = threading.Event(), list[str]()

    def run(self, action: ToolCall) -> str:
        self.events.append("begin")
        self.go_on.wait(20)
        self.events.append("end")
        return "done"

    def fork(self) -> "Slow":
        return Slow()

    def close(self) -> None:
        self.events.append("close")
        if self.go_on.is_set():
            self.go_on.clear()
        else:
            raise OSError("it cannot be closed")


def test_an_object_is_closed_once_its_calls_have_ended() -> None:
    async def check() -> None:
        made: list[Slow] = []

        def make(problem: object) -> Slow:
            made.append(Slow())
            return made[-1]

        environment = MemoryEnvironment(make, [])
        world, other = await environment.start(None), await environment.start(None)
        action = asyncio.ensure_future(world.run(ToolCall("wait", {})))
        while not made[0].events:
            await asyncio.sleep(0.01)
        action.cancel()
        await world.close()  # it does not wait for the thread
        await world.close()
        with pytest.raises(StoppedError, match="this world is closed"):
            await world.observe()
        assert made[0].events == ["begin"]
        made[0].go_on.set()
        while made[0].go_on.is_set():
            await asyncio.sleep(0.01)
        assert made[0].events == ["begin", "end", "close"]
        third = await environment.start(None)
        made[2].go_on.set()
        with pytest.raises(OSError, match="cannot be closed"):
            await environment.close()
        assert made[2].events == made[1].events == ["close"]
        for each in (other, third):
            with pytest.raises(StoppedError):
                await each.snapshot()

    asyncio.run(check())


def test_snapshots_that_are_gone_are_input_errors() -> None:
    environments = [machines()[0] for _ in range(3)]

    async def check() -> None:
        for each in (environments[0], ReplayEnvironment(environments[1])):
            world = await each.start(None)
            name = await world.snapshot()
            await each.delete(name)
            await each.delete(name)
            with pytest.raises(InputError, match="there is no snapshot"):
                await each.restore(name)
            await world.close()
            await world.close()
            await each.close()
            with pytest.raises(StoppedError, match="the environment is closed"):
                await each.start(None)
        environment = environments[2]
        world, name = await environment.start(None), await world_name(environment)
        await environment.close()
        await environment.close()
        with pytest.raises(StoppedError, match="the environment is closed"):
            await environment.restore(name)
        with pytest.raises(InputError, match="this world is closed"):
            await world.observe()
        with pytest.raises(WorldError, match=r"must return an object with a method run\(action\)"):
            await MemoryEnvironment(lambda problem: object(), TOOLS).start(0)  # type: ignore[arg-type, return-value]

    asyncio.run(check())
    with pytest.raises(InputError, match="must contain only names of tools"):
        machines(pure_tools=["fly"])


@pytest.mark.parametrize("how", ["error", "seconds", "actions", "closed"])
def test_nothing_is_left_when_a_search_ends_early(how: str) -> None:
    environment, _ = machines()

    async def fn(root: SearchNode) -> None:
        agent.begin(root, root.search.name)
        nodes = await agent.act(root, 4)
        for node in nodes:
            if not agent.done(node):
                await agent.act(node, 2)
        if how == "error" and root.search.name != "1":
            raise RuntimeError("mine")
        if how == "seconds":
            await asyncio.sleep(60)

    budget = {"seconds": Budget(seconds=0.5), "actions": Budget(actions=3)}.get(how)
    with Agent(environment, turns=turns(), max_live=2) as agent:
        searches = AskTell(fn, ["a", "b", "c"], SamplingParams(seed=1), budget=budget)
        for _ in range(2 if how == "closed" else 50):
            for request in searches.ask():
                assert isinstance(request, SampleRequest)
                reply = policy(3, ends=0)
                searches.tell(
                    request, [reply(request.context.text, seed) for seed in request.seeds]
                )
            if searches.done:
                break
        searches.close()
    assert agent.usage.live == agent.usage.stored == 0
    assert not environment._worlds and not environment._objects
    stops = {"error": None, "closed": None, "seconds": "budget", "actions": "budget"}
    for result in searches.results:
        assert (result is None) == (how == "closed")
        if result is not None and stops[how] is not None:
            assert result.stopped_by is not None and result.stopped_by.value == stops[how]
    with pytest.raises(InputError, match="the agent is closed"):
        agent._worlds.start(None)
