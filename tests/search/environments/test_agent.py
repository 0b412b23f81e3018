"""Agents in environments: a step samples, runs the calls, and appends the results."""

from typing import Any

import pytest
from agent_cases import Machine, chat_tokenizer, drawn, machines, policy, search, turns

from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import step_of
from treegen.search.strategies.beam import beam
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

TOKENIZER = chat_tokenizer()


def prompt() -> str:
    return TOKENIZER.apply_chat_template(  # type: ignore[no-any-return]
        [{"role": "user", "content": "Go."}],
        tools=turns().tools,
        tokenize=False,
        add_generation_prompt=True,
    )


def grow(salt: object, nodes: list[SearchNode], agent: Agent) -> SearchResult:
    async def fn(root: SearchNode) -> SearchOutcome:
        agent.begin(root, salt)
        outcome = await beam(
            root, agent.propose(4), agent.evaluate, agent.done, width=3, depth=5, state=agent.state
        )
        nodes.extend(root.walk())
        return outcome

    (result,) = search(fn, policy(salt), prompts=[prompt()])
    return result


@pytest.mark.parametrize("salt", range(60))
def test_trees_equal_independent_replays(salt: int) -> None:
    check_replays(salt)


@pytest.mark.soak
@pytest.mark.parametrize("salt", range(60, 560))
def test_many_trees_equal_independent_replays(salt: int) -> None:
    check_replays(salt)


def check_replays(salt: int) -> None:
    rng = drawn(salt)
    environment, ran = machines(0, pure_tools=rng.choice([(), ("look",)]))
    nodes: list[SearchNode] = []
    with Agent(environment, turns=turns(), max_live=rng.choice([1, 2, 8])) as agent:
        result = grow(salt, nodes, agent)
        assert result.usage.actions == len(ran)
    steps = [(node, step) for node in nodes if (step := step_of(node)) is not None]
    assert steps and agent.usage.stored == agent.usage.live == 0
    for node, _ in steps:
        machine = Machine((0, salt))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        for above in node.path:
            step = step_of(above)
            if step is None:
                continue
            calls = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in step.reply.calls
            ]
            messages.append(
                {"role": "assistant", "content": step.reply.text.rstrip("\n"), "tool_calls": calls}
            )
            for call, shown in zip(step.reply.calls, step.observations, strict=False):
                assert machine.run(call) == shown
                messages.append({"role": "tool", "content": shown.text})
            if step.end == "done":
                expected = step.observations[-1].reward
                assert step.reward == (machine.observe().reward if expected is None else expected)
        ended = step_of(node)
        assert ended is not None
        if ended.end == "":
            whole = TOKENIZER.apply_chat_template(
                messages, tools=turns().tools, tokenize=False, add_generation_prompt=True
            )
            assert node.path[0].text + node.path_text == whole
