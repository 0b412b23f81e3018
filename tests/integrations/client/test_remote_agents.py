"""Agents whose model is on a server: the context of the model is not known before it is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import KEY, listening
from tool_model import ANSWER, QUESTION, save_tool_model
from tool_schemas import ADD

from treegen import LLM, SamplingParams
from treegen.errors import ContextError
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.search import Agent, MemoryEnvironment, Observation, SearchNode
from treegen.search.environments.branch import NO_ROOM

pytest.importorskip("treegen.integrations.client")
from treegen.integrations.client import RemoteLLM
from treegen.integrations.server.limits import NodeLimits


class Adder:
    """Adds; the text of its results is of a given length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def run(self, action: ToolCall) -> Observation:
        return Observation(text="42" + " 42" * self.length)


def test_an_overflow_of_a_servers_context_ends_its_branch_only(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")
    ends: list[str] = []

    async def fn(root: SearchNode) -> list[SearchNode]:
        agent.begin(root, int(root.search.name))
        (child,) = await agent.act(root)
        found = await agent.act(child)
        if root.search.name == "0":
            ends.extend(end.text for end in found)
            return found
        assert found == [] and child.pruned_because == f"failed: {NO_ROOM}"
        assert isinstance(child.data, dict) and child.data["failure"] == NO_ROOM
        assert len(child.data["observations"]) == 1
        assert await agent.act(child) == []
        (other,) = await agent.act(root)  # the search goes on
        return [other]

    environment = MemoryEnvironment(Adder, ADD)
    turns = ToolTurns(llm.tokenizer, ADD)
    problems = [(str(length), [{"role": "user", "content": QUESTION}]) for length in (0, 10_000)]
    params = SamplingParams(temperature=0.01, max_tokens=200, seed=0)
    with (
        listening(llm, nodes=NodeLimits()) as running,
        Agent(environment, turns=turns) as agent,
    ):
        remote = RemoteLLM(f"{running.url}/v1", KEY)
        for result in remote.search(fn, problems, params, tools=ADD):
            assert result.error is None, result.exception
        with pytest.raises(ContextError, match="model's context"):
            remote.search(fn, ["too long " * 5_000], params)
    assert ends == [ANSWER]
    assert agent.usage.live == agent.usage.stored == 0
