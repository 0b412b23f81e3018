"""What agents run and store: actions once, few live worlds, no snapshot left, budgets in order."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from agent_cases import call_text, machines, policy, search, turns

from treegen.errors import InputError
from treegen.prompts.replies.types import ToolCall
from treegen.search.budget import Budget
from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import step_of
from treegen.search.environments.protocol import Environment, Observation, Traits
from treegen.search.environments.replay import ReplayEnvironment
from treegen.search.evaluate import rollouts
from treegen.search.event_loop import gather
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.lats import lats
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.rebase import rebase
from treegen.search.tree.node import SearchFn, SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult


class Track:
    """A world that counts actions and never ends."""

    def __init__(self, ran: list[str]) -> None:
        self.ran, self.path = ran, ""

    def run(self, action: ToolCall) -> Observation:
        self.ran.append(action.name)
        self.path += f"{action.arguments['by']}"
        return Observation(text=self.path, reward=float(len(self.path)))

    def fork(self) -> "Track":
        copy = Track(self.ran)
        copy.path = self.path
        return copy


def tracks(*, has_snapshots: bool = True) -> tuple[Environment, list[str]]:
    ran: list[str] = []
    environment, _ = machines()
    environment._make = lambda problem: Track(ran)
    environment.traits = Traits(has_snapshots=has_snapshots)
    return environment, ran


def by_seed(context: str, seed: int) -> str:
    return call_text(ToolCall("left", {"by": seed % 10**6}))


def always(context: str, seed: int) -> str:
    return call_text(ToolCall("left", {"by": 1}))


async def chain(agent: Agent, node: SearchNode, num: int) -> SearchNode:
    for _ in range(num):
        (node,) = await agent.act(node, keep=False)
    return node


def test_branches_share_the_actions_and_tokens_before_they_part() -> None:
    environment, ran = tracks()
    ends: list[SearchNode] = []

    async def together(root: SearchNode) -> None:
        agent.begin(root)
        trunk = await chain(agent, root, 8)
        children = await agent.act(trunk, 8)
        ends.extend(await gather(chain(agent, child, 1) for child in children))

    async def apart(root: SearchNode) -> None:
        agent.begin(root)
        await chain(agent, root, 10)

    with Agent(environment, turns=turns()) as agent:
        (tree,) = search(together, by_seed)
        assert len({node.path_text for node in ends}) == 8
        assert tree.usage.actions == len(ran) == 24
    assert agent.usage.snapshots <= 2 and agent.usage.stored == 0
    environment, ran = tracks()
    with Agent(environment, turns=turns()) as agent:
        trials = search(apart, by_seed, prompts=["Go."] * 8)
    assert sum(trial.usage.actions for trial in trials) == len(ran) == 80
    # Replies and results have the same length in every step.
    alone = [sum(trial.usage.tokens_decoded for trial in trials)]
    assert tree.usage.tokens_decoded * 80 == alone[0] * 24


def test_equal_calls_run_once_and_share_the_result() -> None:
    environment, ran = tracks()

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        first = await agent.act(root, 4)
        second = [child for node in first for child in await agent.act(node, 2)]
        assert len(first) == 4 and len(second) == 8
        texts = {step.observations[0].text for node in second if (step := step_of(node))}
        assert texts == {"11"} and len(ran) == 2

    with Agent(environment, turns=turns(), max_live=1) as agent:
        (result,) = search(fn, always)
        assert result.usage.actions == 2


def test_pure_calls_run_once_in_one_state() -> None:
    environment, ran = machines(pure_tools=["look"])
    look, left = ToolCall("look", {}), ToolCall("left", {"by": 1})

    def reply(context: str, seed: int) -> str:
        return call_text(look, left) if context.count("<tool_response>") == 2 else call_text(look)

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        (once,) = await agent.act(root)
        (twice,) = await agent.act(once)
        children = await agent.act(twice, 2)
        assert [call.name for call in ran] == ["look", "left"]
        step = step_of(children[0])
        assert step is not None
        assert step.observations[0].text == "state 0"

    with Agent(environment, turns=turns()) as agent:
        (result,) = search(fn, reply)
        assert result.usage.actions == 2 and agent.usage.snapshots <= 1


Make = Callable[[Agent], SearchFn]


def begun(agent: Agent, fn: SearchFn) -> SearchFn:
    async def whole(root: SearchNode) -> object:
        agent.begin(root, root.search.name)
        return await fn(root)

    return whole


async def no_lesson(end: SearchNode, reward: float) -> str:
    return ""


METHODS: dict[str, Make] = {
    "best-of-n": lambda agent: begun(
        agent, lambda root: best_of_n(root, 6, agent.evaluate, play=agent.play, done=agent.done)
    ),
    "beam": lambda agent: begun(
        agent,
        lambda root: beam(
            root, agent.propose(3), agent.evaluate, agent.done, width=3, depth=4, state=agent.state
        ),
    ),
    "dvts": lambda agent: begun(
        agent,
        lambda root: dvts(root, agent.propose(2), agent.evaluate, agent.done, subtrees=3, depth=4),
    ),
    "rebase": lambda agent: begun(
        agent,
        lambda root: rebase(root, agent.step, agent.evaluate, agent.done, width=6, depth=4),
    ),
    "mcts": lambda agent: begun(
        agent,
        lambda root: mcts(
            root,
            agent.propose(2),
            agent.evaluate,
            agent.done,
            iterations=12,
            batch=3,
            state=agent.state,
        ),
    ),
    "mcts with episodes": lambda agent: begun(
        agent,
        lambda root: mcts(
            root,
            agent.propose(2),
            rollouts(2, agent.done, agent.evaluate, play=agent.play),
            agent.done,
            iterations=5,
        ),
    ),
    "lats": lambda agent: begun(
        agent,
        lambda root: lats(
            root,
            lambda node, lessons: agent.step(node, 2),
            lambda nodes, lessons: agent.evaluate(nodes),
            agent.done,
            agent.evaluate,
            no_lesson,
            iterations=4,
            depth=4,
            state=agent.state,
        ),
    ),
    "ab-mcts": lambda agent: begun(
        agent,
        lambda root: ab_mcts(
            root, agent.step, agent.evaluate, agent.done, iterations=12, batch=3, state=agent.state
        ),
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "budget",
    [None, Budget(actions=9), Budget(tokens=60), Budget(nodes=15)],
    ids=["free", "actions", "tokens", "nodes"],
)
def test_trees_do_not_depend_on_timing(method: str, budget: Budget | None) -> None:
    kept: list[SearchResult] = []
    for attempt in range(3):
        environment, ran = machines(method)
        with Agent(environment, turns=turns(), max_live=[8, 2, 1][attempt], max_steps=5) as agent:
            results = search(
                METHODS[method](agent),
                policy(method),
                prompts=["Go.", "Come."],
                budget=budget,
                shuffle=random.Random(attempt) if attempt else None,
            )
            assert agent.usage.most_live <= [8, 2, 1][attempt]
        assert agent.usage.stored == agent.usage.live == 0
        assert sum(result.usage.actions for result in results) == len(ran)
        if budget is not None and budget.actions is not None:
            assert all(result.usage.actions <= budget.actions for result in results)
        kept = kept or results
        assert [result.tree for result in results] == [result.tree for result in kept]
        assert [result.best for result in results] == [result.best for result in kept]
        assert [result.usage.actions for result in results] == [
            result.usage.actions for result in kept
        ]
    assert any(result.usage.actions for result in kept)
    if budget is None:
        assert all(result.best is not None for result in kept)


def test_rewards_may_come_from_the_environment_and_a_verifier() -> None:
    environment, _ = tracks()

    async def verify(nodes: Sequence[SearchNode]) -> list[float]:
        return [10.0] * len(nodes)

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        children = await agent.act(root, 2)
        assert await agent.evaluate(children) == [1.0, 1.0]
        assert await agent.evaluate_with(verify)(children) == [5.5, 5.5]
        assert await agent.evaluate_with(verify, max)(children) == [10.0, 10.0]
        assert await agent.rewards([root]) == [None]
        assert await agent.evaluate([root]) == [0.0]
        assert await agent.evaluate_with(verify)([root]) == [10.0]
        assert await agent.observe(children[0]) == Observation()

    with Agent(environment, turns=turns()) as agent:
        search(fn, always)


def test_environments_without_snapshots_are_forked_by_replay() -> None:
    environment, ran = tracks(has_snapshots=False)

    async def fn(root: SearchNode) -> SearchOutcome:
        agent.begin(root)
        return await beam(
            root, agent.propose(2), agent.evaluate, agent.done, width=2, depth=4, state=agent.state
        )

    with Agent(environment, turns=turns(), max_live=1) as agent:
        (result,) = search(fn, by_seed)
        replayed = agent._worlds.environment
        assert isinstance(replayed, ReplayEnvironment) and replayed.num_replayed
        assert result.usage.actions + replayed.num_replayed == len(ran)
    environment, _ = tracks()
    with Agent(environment, turns=turns()) as agent:
        (other,) = search(fn, by_seed)
    assert result.tree == other.tree


def test_forks_do_not_see_each_other() -> None:
    environment, _ = tracks()

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        nodes = await agent.act(root, 5)
        for _ in range(3):
            nodes = [child for node in nodes for child in await agent.act(node, 2)]
        for node in nodes:
            steps = [step for above in node.path if (step := step_of(above)) is not None]
            path = "".join(str(step.reply.calls[0].arguments["by"]) for step in steps)
            assert steps[-1].observations[0].text == path

    with Agent(environment, turns=turns(), max_live=3) as agent:
        search(fn, by_seed)


def test_an_agent_says_what_is_wrong_with_its_use() -> None:
    environment, _ = tracks()

    async def fn(root: SearchNode) -> None:
        with pytest.raises(InputError, match="call agent"):
            await agent.act(root)
        agent.begin(root)
        with pytest.raises(InputError, match="begin at another node"):
            agent.begin(root)
        (end,) = await agent.act(root)
        with pytest.raises(InputError, match="the episode ended"):
            await agent.act(end)
        root.drop()
        with pytest.raises(InputError, match="was dropped"):
            await agent.act(root)

    with Agent(environment, turns=turns()) as agent:
        search(fn, lambda context, seed: "No call.")
    world: Any = Track([])
    with pytest.raises(InputError, match="Track is not an environment"):
        Agent(world)
    with pytest.raises(InputError, match="remove the argument stop"):
        Agent(environment, stop="\n")
    with pytest.raises(InputError, match="max_live"):
        Agent(environment, max_live=0)
    with pytest.raises(InputError, match="max_seconds"):
        Agent(environment, max_seconds=0)
