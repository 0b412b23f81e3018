"""Agents over tiny models: the text of a path is that of the whole chat, and so are its tokens."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from agent_cases import TEMPLATE, TOOLS, machines
from tool_model import ANSWER, CALL, QUESTION, save_tool_model
from tool_schemas import ADD
from tool_texts import WRITERS

from treegen import LLM, SamplingParams
from treegen.common.outputs import Completion
from treegen.prompts.replies.types import Reply, ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.search.budget import Budget, StopReason
from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import NO_ROOM, step_of
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Observation, World
from treegen.search.strategies.beam import beam
from treegen.search.tree.node import SearchFn, SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

CHAT = [{"role": "user", "content": QUESTION}]


class Adder:
    def run(self, action: ToolCall) -> Observation:
        return Observation(text=str(sum(action.arguments.values())))

    def observe(self) -> Observation:
        return Observation(reward=1.0)


def ids_of(node: SearchNode) -> list[int]:
    context: Any = node._live()
    return [int(token) for token in context.segment.path_tokens()]


def search(llm: LLM, fn: SearchFn) -> SearchResult:
    """Ask the question, and check that nothing failed."""
    params = SamplingParams(temperature=0.01, max_tokens=200, seed=0)
    (result,) = llm.search(fn, [CHAT], params, tools=ADD)
    assert result.error is None, result.exception
    return result


@pytest.mark.parametrize("writer", ["hermes", "llama", "qwen3_coder"])
def test_a_model_calls_a_tool_and_answers_by_its_result(tmp_path: Path, writer: str) -> None:
    assert writer in WRITERS
    llm = LLM(str(save_tool_model(tmp_path, writer)), memory="32MiB", dtype="float32")
    seen: list[list[int]] = []

    async def fn(root: SearchNode) -> SearchNode:
        agent.begin(root)
        first, second = await agent.act(root, 2)
        step = step_of(first)
        assert step is not None and [call.name for call in step.reply.calls] == ["add"]
        assert step.reply.calls[0].arguments == CALL["arguments"]
        assert step.observations == (Observation(text="42"),)
        seen.append(ids_of(first))
        (end,) = await agent.act(second)
        assert agent.done(end) and end.text == ANSWER
        assert await agent.evaluate([end]) == [1.0]
        return end

    with Agent(MemoryEnvironment(lambda problem: Adder(), ADD)) as agent:
        result = search(llm, fn)
        assert result.usage.actions == 1
    assert agent.usage.started == 1 and agent.usage.stored == agent.usage.live == 0
    chat = [
        *CHAT,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "42"},
    ]
    whole = llm.tokenizer.apply_chat_template(
        chat, tools=ADD, tokenize=False, add_generation_prompt=True
    )
    assert seen == [llm.tokenizer(whole, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("accepts_cut", [False, True])
def test_results_beyond_the_context_end_their_branch_only(
    tmp_path: Path, accepts_cut: bool
) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")
    lengths = iter([0, 10_000, 0])

    class Talker(Adder):
        def run(self, action: ToolCall) -> Observation:
            return Observation(text="42" + " 42" * next(lengths))

    async def fn(root: SearchNode) -> list[SearchNode]:
        ends = []
        for branch in (root, root.extend(""), root.extend("")):
            agent.begin(branch)
            ends += await agent.act(branch)
        if accepts_cut:
            assert len(ends) == 3
            return [end for end in ends if end.num_context_tokens < llm.spec.context_length]
        assert len(ends) == 2
        (full,) = [node for node in root.walk() if node.pruned]
        assert full.pruned_because == f"failed: {NO_ROOM}"
        step = step_of(full)
        assert step is not None and step.end == "failed" and len(step.observations) == 1
        return [child for end in ends for child in await agent.act(end)]

    environment = MemoryEnvironment(lambda problem: Talker(), ADD)
    with Agent(environment, accepts_cut_replies=accepts_cut) as agent:
        result = search(llm, fn)
        assert len(result.candidates) == 2
    assert agent.usage.live == agent.usage.stored == 0


def test_no_steps_follow_a_message_that_fills_the_context(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")

    async def fn(root: SearchNode) -> SearchNode:
        agent.begin(root)
        (child,) = await agent.act(root)
        assert await agent.act(agent.instruct(child, "Go on. " * 2_000), 2) == []
        (end,) = await agent.act(child)
        return end

    with Agent(MemoryEnvironment(lambda problem: Adder(), ADD)) as agent:
        search(llm, fn)


def test_results_that_utf8_cannot_encode_are_shown_with_question_marks(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")

    class Talker(Adder):
        def run(self, action: ToolCall) -> Observation:
            return Observation(text="4\ud800 \udc80")

    async def fn(root: SearchNode) -> SearchNode:
        agent.begin(root)
        (child,) = await agent.act(root)
        assert "4? ?" in child.text
        return child

    with Agent(MemoryEnvironment(lambda problem: Talker(), ADD)) as agent:
        search(llm, fn)


def test_a_world_is_scored_though_the_seconds_of_the_search_are_over(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path, "hermes")), memory="32MiB", dtype="float32")

    async def score(world: World) -> float | None:
        await asyncio.sleep(0.5)
        return (await world.observe()).reward

    async def fn(root: SearchNode) -> SearchNode:
        agent.begin(root)
        environment = agent.environment
        scores.append(await agent.use_world(root, lambda: environment.start(None), score))
        return root

    scores: list[float | None] = []
    with Agent(MemoryEnvironment(lambda problem: Adder(), ADD)) as agent:
        (result,) = llm.search(fn, [CHAT], budget=Budget(seconds=0.1), tools=ADD)
    assert scores == [1.0]
    assert result.best == 0 and result.error is None
    assert result.stopped_by is StopReason.BUDGET


def test_a_random_model_that_is_forced_to_call_searches_a_machine(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tiny_models.save_tiny_model(tmp_path, "llama", seed=0, max_position_embeddings=4096)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("<|im_end|>", "</s>"))
    llm = LLM(str(tmp_path), check=False, device="cpu", memory="32MiB")
    tools = json.loads(json.dumps(TOOLS))
    for tool in tools:
        tool["function"]["parameters"] = {
            "type": "object",
            "properties": {"by": {"enum": [0, 1]}},
            "required": ["by"],
            "additionalProperties": False,
        }
    nodes: list[tuple[list[int], str]] = []

    def run(max_live: int) -> Any:
        environment, ran = machines()
        environment.tools = tools

        async def fn(root: SearchNode) -> SearchOutcome:
            agent.begin(root, root.search.name)
            outcome = await beam(
                root,
                agent.propose(4),
                agent.evaluate,
                agent.done,
                width=2,
                depth=3,
                state=agent.state,
            )
            nodes.extend(
                (ids_of(node), node.path[0].text + node.path_text)
                for node in root.walk()
                if step_of(node) is not None and node.is_live
            )
            return outcome

        with Agent(
            environment, forces_calls=True, max_live=max_live, max_tokens=200, temperature=1.0
        ) as agent:
            results = llm.search(
                fn,
                [(str(i), [{"role": "user", "content": f"Go {i}."}]) for i in range(2)],
                SamplingParams(seed=0),
                tools=tools,
            )
        assert agent.usage.live == agent.usage.stored == 0
        for result in results:
            assert result.error is None, result.exception
        assert sum(result.usage.actions for result in results) == len(ran)
        assert any(node.depth > 2 for result in results for node in result.tree.nodes)
        return [result.tree for result in results]

    for actual, expected in zip(run(8), run(1), strict=True):
        # Rows that run beside a sample change the last bits of its sum, which has three decimals.
        for node, other in zip(actual.nodes, expected.nodes, strict=True):
            assert node.logprob == pytest.approx(other.logprob, abs=1.1e-3)
            assert replace(node, logprob=0.0) == replace(other, logprob=0.0)
    assert nodes


def test_branches_prefill_as_few_tokens_as_one_trial(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")

    async def fn(root: SearchNode) -> None:
        agent.begin(root)
        (child,) = await agent.act(root)
        ends = await agent.act(child, int(root.search.name))
        assert len(ends) == int(root.search.name)

    usage = {}
    for name in ("1", "8"):
        problem = (name, CHAT)
        params = SamplingParams(temperature=0.01, max_tokens=200, seed=0)
        with Agent(MemoryEnvironment(lambda problem: Adder(), ADD)) as agent:
            (result,) = llm.search(fn, [problem], params, tools=ADD)
        assert result.error is None, result.exception
        usage[name] = result.usage
    one, eight = usage["1"], usage["8"]
    assert eight.tokens_prefilled <= one.tokens_prefilled
    num_answer = (eight.tokens_decoded - one.tokens_decoded) // 7
    assert eight.tokens_decoded == one.tokens_decoded + 7 * num_answer
    assert one.actions == eight.actions == 1


def test_sessions_take_steps_too(tmp_path: Path) -> None:
    llm = LLM(str(save_tool_model(tmp_path)), memory="32MiB", dtype="float32")
    params = SamplingParams(temperature=0.01, max_tokens=200, seed=0)
    with (
        Agent(MemoryEnvironment(lambda problem: Adder(), ADD)) as agent,
        llm.session(params) as session,
    ):
        root = session.root(CHAT, tools=ADD)
        started = session.start(agent.act(agent.begin(root)))
        while not started.is_done:
            session.step()
        (child,) = started.result
        assert step_of(child) is not None and "42" in child.text


class Scripted(ToolTurns):
    """Reads any reply as one call, which of two follows from its seed."""

    def read(self, completion: Completion, before: Sequence[int] = ()) -> Reply:
        return Reply("", [ToolCall("left" if completion.seed % 2 else "right", {})])

    def render_results(
        self, calls: Sequence[ToolCall], results: Sequence[str], stop: int | str | None
    ) -> str:
        return f"Result: {results[0]}."


def encoded(picture: Any) -> bytes:
    picture.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("is_pure", [False, True])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda image: b"", "the image in bytes is empty"),
        (lambda image: b"not an image", "the image in bytes is not an image in a supported format"),
        (lambda image: image[:200], "the image in bytes is corrupt"),
    ],
    ids=["empty", "text", "cut"],
)
def test_an_image_that_cannot_be_decoded_ends_its_branch_only(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: str, is_pure: bool
) -> None:
    images = pytest.importorskip("tiny_images")
    model = str(images.save_tiny_vision_model(tmp_path, "llava"))
    llm = LLM(model, images=True, memory="32MiB", dtype="float32")
    image = encoded(images.picture(0))

    class Camera:
        def run(self, action: ToolCall) -> Observation:
            return Observation(images=(damage(image) if action.name == "left" else image,))

        def observe(self) -> Observation:
            return Observation()

    async def fn(root: SearchNode) -> list[SearchNode]:
        agent.begin(root)
        children = await agent.act(root, 8)
        failed = [node.pruned_because for node in root.walk() if node.pruned]
        start = f"failed: the environment returned an image that cannot be used: {said}"
        assert failed and all(reason.startswith(start) for reason in failed)
        assert children and len(children) + len(failed) == 8
        for child in children:
            assert child.text == "Result: [the image in bytes]\n."
            following = await agent.act(child, 8)  # the model reads the image
            assert following, [node.pruned_because for node in child.walk()]
        return children

    tools = [tool for tool in TOOLS if tool["function"]["name"] in ("left", "right")]
    environment = MemoryEnvironment(
        lambda problem: Camera(), tools, pure_tools=("left", "right") if is_pure else ()
    )
    turns = Scripted(llm.tokenizer, tools, tool_format="hermes")
    # Every token ends a reply.
    with Agent(environment, turns=turns, stop_token_ids=list(range(384))) as agent:
        (result,) = llm.search(fn, ["Look."], SamplingParams(seed=0))
        assert result.error is None, result.exception
    assert agent.usage.live == agent.usage.stored == 0
