"""What an agent keeps for the nodes of a search: replies, steps, and states that nodes share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from treegen.common.formatting import replace_surrogates
from treegen.errors import InputError, WorldError
from treegen.prompts.replies.types import Reply
from treegen.prompts.tool_turns import ToolTurns
from treegen.prompts.tree import Parts
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.environments.protocol import Observation, call_key, observation_json
from treegen.search.environments.states import Outcome, WorldState
from treegen.search.environments.worlds import LiveWorlds
from treegen.search.tree.node import SearchNode


def find_last_tokens(node: SearchNode) -> Sequence[int]:
    """Return the last token ids before a sample; none if they are not known."""
    tail = getattr(node._context, "tail", None)
    return () if tail is None else [int(token) for token in tail()]


def call_keys(reply: Reply) -> tuple[str, ...]:
    """Return the keys of a reply's calls."""
    return tuple(map(call_key, reply.calls))


def read_reply(turns: ToolTurns, sample: SearchNode, before: Sequence[int]) -> Reply:
    """Return a sample as a reply; one that was cut off has no calls.

    Args:
        turns: Reads calls.
        sample: The sample.
        before: The last token ids before it; none if they are not known.
    """
    completion = sample.completion
    assert completion is not None
    if completion.finish_reason != "stop":  # a call at the end may be cut off
        return Reply(completion.text, [])
    return turns.read(completion, before)


def render_outcome(
    turns: ToolTurns, reply: Reply, outcome: Outcome, sample: SearchNode
) -> str | Parts:
    """Return the results of a reply's calls, as text or parts to append to the sample.

    Args:
        turns: Renders the results.
        reply: The sample as a reply.
        outcome: What its calls have done.
        sample: The sample.
    """
    results = outcome.observations
    # Texts next to images are marked, because a text may be empty or stand elsewhere, too.
    marks = {i: secrets.token_hex(16) for i, result in enumerate(results) if result.images}
    texts = [marks.get(i, result.text) for i, result in enumerate(results)]
    text = replace_surrogates(turns.render_results(reply.calls, texts, sample.stop))
    if not marks:
        return text
    parts: list[Mapping[str, Any]] = []
    for index, mark in marks.items():
        before, _, text = text.partition(mark)
        parts.append({"type": "text", "text": before + replace_surrogates(results[index].text)})
        parts += [{"type": "image", "image": image} for image in results[index].images]
    return [*parts, {"type": "text", "text": text}]


StepEnd = Literal["", "answer", "done", "failed"]

NO_ROOM: Final = "the results leave no room for a reply in the model's context"
"""The failure of a step after which the model cannot reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStep:
    """One step of an agent: a reply, and what its calls have shown."""

    reply: Reply
    """The model's reply."""
    observations: tuple[Observation, ...] = ()
    """One for each call that ended, in the order of `reply.calls`."""
    end: StepEnd = ""
    """What ended the episode: "answer" for a reply without calls, "done" for the environment,
    "failed" for a failure of either; "" if it goes on."""
    failure: str = ""
    """What failed; "" if nothing did."""
    reward: float | None = None
    """The environment's judgement of the state after the step, if it came with the step."""

    def describe(self) -> str:
        """Return the calls and results as lines of text, or the answer."""
        lines = [f"Call: {call_key(call)}" for call in self.reply.calls]
        lines += [f"Result: {observation.text}" for observation in self.observations]
        return "\n".join(
            [*lines, *([f"Answer: {self.reply.text}"] if self.end == "answer" else [])]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object, without fields that are empty."""
        calls = [{"name": call.name, "arguments": call.arguments} for call in self.reply.calls]
        record = {
            "thoughts": self.reply.thoughts,
            "text": self.reply.text,
            "calls": calls,
            "observations": [observation_json(observation) for observation in self.observations],
            "end": self.end,
            "failure": self.failure,
        }
        record = {name: value for name, value in record.items() if value}
        return record if self.reward is None else {**record, "reward": self.reward}


def make_step(
    sample: SearchNode, reply: Reply, outcome: Outcome | None, accepts_cut: bool
) -> AgentStep:
    """Return the step of a sample.

    Args:
        sample: The sample.
        reply: The sample as a reply.
        outcome: What its calls have done; None if it has none.
        accepts_cut: Whether it is an answer if it was cut off.
    """
    if sample.finish_reason != "stop" and not (accepts_cut and sample.finish_reason == "length"):
        cut = f"the reply was cut off ({sample.finish_reason})"
        return AgentStep(reply=reply, end="failed", failure=cut)
    if outcome is None:
        return AgentStep(reply=reply, end="answer")
    end: StepEnd = "failed" if outcome.failure else "done" if outcome.state is None else ""
    return AgentStep(
        reply=reply,
        observations=outcome.observations,
        end=end,
        failure=outcome.failure,
        reward=outcome.reward,
    )


@dataclass(slots=True, eq=False)
class SharedState:
    """A state of a world, and the nodes that may act from it."""

    worlds: LiveWorlds
    """Runs the world."""
    state: Future[WorldState]
    """A future of the state."""
    above: tuple[SharedState, tuple[str, ...]] | None = None
    """The state that it follows from, and its index in the `runs` of that state."""
    num_owners: int = 1
    """Nodes that hold it; without any it is released."""
    runs: dict[tuple[str, ...], SharedRun] = field(default_factory=dict)
    """The calls that were run from it, by their keys."""

    def add_owner(self) -> SharedState:
        """Return the state for one more node."""
        self.num_owners += 1
        return self

    def release(self) -> None:
        """Take a node away from the owners."""
        self.num_owners -= 1
        if self.num_owners:
            return
        if self.above is not None:
            self.above[0].runs.pop(self.above[1], None)
        for run in self.runs.values():
            if run.after is None:
                self.worlds.cancel(run.outcome, self.state)
        self.worlds.release(self.state)

    def follow(self, keys: tuple[str, ...], run: SharedRun, after: WorldState) -> SharedState:
        """Return the state after calls, for one more node.

        Args:
            keys: The keys of the calls.
            run: The calls.
            after: The state, which is this one if the calls change nothing.
        """
        if after is self.state.result():
            return self.add_owner()
        if run.after is not None:
            return run.after.add_owner()
        future: Future[WorldState] = Future()
        future.set_result(after)
        run.after = SharedState(self.worlds, future, (self, keys), num_owners=2)  # see `join`
        return run.after


@dataclass(slots=True, eq=False)
class SharedRun:
    """Calls that run from a state once, for all replies that make them."""

    outcome: Future[Outcome]
    """A future of their outcome."""
    after: SharedState | None = None
    """The state after them, once a node has it."""
    is_counted: bool = False
    """Whether the search has counted its actions."""
    num_users: int = 0
    """Steps that wait for it. While there are some, it owns the state after it, because a step that
    resumes earlier may go on from there and release it."""

    def join(self) -> SharedRun:
        """Return the run for one more step."""
        self.num_users += 1
        if self.num_users == 1 and self.after is not None:
            self.after.add_owner()
        return self

    def leave(self) -> None:
        """Take a step away from the users."""
        self.num_users -= 1
        if not self.num_users and self.after is not None:
            self.after.release()


@dataclass(slots=True, eq=False)
class Branch:
    """What an agent keeps for a node."""

    actions: tuple[str, ...] = ()
    """The keys of all actions from the root."""
    step: AgentStep | None = None
    """The step that led here; None at the root."""
    state: SharedState | None = None
    """The state of the world; None if the episode is over."""

    def release(self) -> None:
        """Release the state; a second call does nothing."""
        if (state := self.state) is not None:
            self.state = None
            state.release()


def step_of(node: SearchNode) -> AgentStep | None:
    """Return the step that led to a node; None at a root and outside of episodes."""
    return node.branch.step if isinstance(node.branch, Branch) else None


def branch_of(node: SearchNode) -> Branch:
    """Return what an agent keeps for a node.

    Raises:
        InputError: The node is not part of an episode.
    """
    if not isinstance(node.branch, Branch):
        raise InputError(
            f"node {node.key!r} is not part of an episode; call agent.begin(root, problem)"
        )
    return node.branch


def find_last_reward(node: SearchNode) -> float | None:
    """Return the reward that came with the step to a node; None if none did."""
    step = step_of(node)
    return None if step is None else step.reward


def fail_step(node: SearchNode, step: AgentStep) -> None:
    """Prune the last node of a step that failed."""
    actions = node.branch.actions if isinstance(node.branch, Branch) else ()
    node.free()
    node.branch, node.data = Branch(actions, step), step.to_json()
    node.pruned, node.pruned_because = True, f"failed: {step.failure}"[:200]


def fail_node(node: SearchNode, failure: str) -> None:
    """Prune a node where the episode cannot go on.

    Args:
        node: The node.
        failure: Why not.

    Raises:
        WorldError: It is a root, or has children, which have gone on from it.
    """
    if node.parent is None or node.children:
        raise WorldError(failure)
    step = step_of(node) or AgentStep(reply=Reply("", []))
    fail_step(node, replace(step, end="failed", failure=failure))


def is_full(node: SearchNode) -> bool:
    """Return whether the model's context has no room for a token after a node.

    The context of a model on a server is not known.
    """
    spec = getattr(node.search.backend, "spec", None)
    return spec is not None and node.num_context_tokens >= spec.context_length


def count_actions(search: BudgetedSearch, runs: Mapping[tuple[str, ...], SharedRun]) -> None:
    """Count the actions of runs for a search. Each run counts once."""
    for key, run in runs.items():
        if run.is_counted:
            continue
        run.is_counted = True
        search.num_pending_actions -= len(key)
        outcome = run.outcome
        is_over = outcome.done() and not outcome.cancelled() and outcome.exception() is None
        search.usage.actions += outcome.result().num_run if is_over else len(key)
        # Which of several replies has run a call that they share depends on timing.
        search.num_counted_actions += outcome.result().num_calls if is_over else len(key)
