"""Agents: models that act in environments by tool calls, as steps of a search.

A step samples a reply, runs the tool calls in it, and appends their results. The node that it
returns has the model's cache and the environment's state, so both fork at any node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from treegen.common.checks import check_int
from treegen.common.lifetimes import Closeable
from treegen.errors import ContextError, InputError, WorldError
from treegen.prompts.replies.types import Reply
from treegen.prompts.tool_turns import ToolTurns
from treegen.search.budget import BudgetReached
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.environments.branch import (
    NO_ROOM,
    Branch,
    SharedRun,
    SharedState,
    branch_of,
    call_keys,
    count_actions,
    fail_node,
    fail_step,
    find_last_reward,
    find_last_tokens,
    is_full,
    make_step,
    read_reply,
    render_outcome,
    step_of,
)
from treegen.search.environments.protocol import (
    Environment,
    Observation,
    World,
    check_environment,
)
from treegen.search.environments.states import MAX_SECONDS, WorldUsage
from treegen.search.environments.worlds import LiveWorlds
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.event_loop import gather
from treegen.search.external_calls import await_external
from treegen.search.propose import Propose
from treegen.search.tree.node import SearchNode

T = TypeVar("T")


class Agent(Closeable):
    """A model that acts in an environment by tool calls.

        async def search(root):
            agent.begin(root, problems[root.search.name])
            return await beam(root, agent.propose(4), agent.evaluate, agent.done,
                              width=4, depth=10, state=agent.state)

        with Agent(environment) as agent:
            results = llm.search(search, prompts, tools=environment.tools)

    Equal calls from one state run once, and their replies share the result. So a world is forked
    only for distinct calls, and worlds count as functions of their actions.

    A step whose environment fails, or whose reply was cut off, ends its branch: the node stays in
    the tree, pruned, with the failure in its `data`. So does a step that takes too long, and a node
    whose state cannot be observed for its reward.

    Attributes:
        environment: The environment.
        turns: Reads calls and renders results; None before the first step, unless it was given.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        turns: ToolTurns | None = None,
        template: Mapping[str, Any] | None = None,
        max_live: int = 8,
        max_seconds: float = MAX_SECONDS,
        max_steps: int = 30,
        forces_calls: bool = False,
        accepts_cut_replies: bool = False,
        **overrides: Any,
    ) -> None:
        """Create an agent; one serves many searches.

        Args:
            environment: Starts the worlds. `close` closes it.
            turns: Reads calls and renders results. By default the tokenizer of the search's model
                and its chat template do.
            template: Further variables of the chat template, as for the prompts. Default: none.
            max_live: Maximum number of live worlds. If another world needs a place, one that waits
                for the model is snapshotted and closed.
            max_seconds: Longest time of one action, snapshot or restoration. A longer one ends its
                branch.
            max_steps: Maximum number of steps of an episode of `play`.
            forces_calls: Whether each reply has to call a tool, once.
            accepts_cut_replies: Whether a reply that max_tokens has cut off ends its episode as an
                answer does, so that the environment judges the state. By default it is a failure.
            **overrides: Sampling parameters of replies, as for `SearchNode.sample`.
        """
        check_environment(environment)
        check_int("max_steps", max_steps, minimum=1)
        if overrides.get("stop"):
            raise InputError(
                "stop is not supported for agents, because the model ends each reply; remove the "
                "argument stop"
            )
        self.environment, self.turns, self._template = environment, turns, template
        self._worlds = LiveWorlds(environment, max_live=max_live, max_seconds=max_seconds)
        self._max_steps, self._forces_calls = max_steps, forces_calls
        self._accepts_cut = accepts_cut_replies
        self._overrides = {"stop": (), **overrides}

    @property
    def usage(self) -> WorldUsage:
        """Counts of what the environment has done for all searches."""
        return self._worlds.usage

    def close(self) -> None:
        """Close all worlds, delete all snapshots, and close the environment."""
        self._worlds.close()

    def begin(self, root: SearchNode, problem: Any = None) -> SearchNode:
        """Start an episode and its world at a node, and return the node.

        The first step waits for the world. So a world that cannot start ends the search before
        anything is sampled.

        Args:
            root: The node, whose text has the problem and shows the tools.
            problem: What `Environment.start` gets. Default: None.

        Raises:
            InputError: The node is part of an episode, or the agent is closed.
        """
        if root.branch is not None:
            raise InputError(f"node {root.key!r} is part of an episode; begin at another node")
        root.branch = Branch(state=SharedState(self._worlds, self._worlds.start(problem)))
        return root

    # Steps

    async def act(
        self, node: SearchNode, n: int = 1, *, keep: bool = True, **overrides: Any
    ) -> list[SearchNode]:
        """Take n steps from a node: sample replies, run their calls, and append the results.

        A reply without a call ends the episode, and is returned as it is. Failed steps are in the
        tree, but they are not returned.

        Args:
            node: A node with which an episode begins (`begin`) or that a step has returned.
            n: Steps to take.
            keep: Whether further steps may be taken from the node later. If not, its world can go
                on without a snapshot.
            **overrides: Sampling parameters that replace those of the agent.

        Raises:
            BudgetReached: As for `SearchNode.sample`; also if the budget has no room for the calls
                of a reply.
            InputError: The episode is over or has not begun, or the node was dropped.
            WorldError: The world of an episode that begins at the root cannot be started.
        """
        branch = branch_of(node)
        if branch.step is not None and branch.step.end == "failed":
            return []
        if branch.step is not None and branch.step.end:
            raise InputError(
                f"the episode ended at node {node.key!r}; call act with an earlier node"
            )
        if branch.state is None:
            raise InputError(f"node {node.key!r} was dropped; use a node that was not dropped")
        turns, before = self.turns_of(node), find_last_tokens(node)
        samples = await self._sample(node, branch, n, {**self._overrides, **overrides})
        if branch.state is None:  # the node was dropped meanwhile
            return []
        state, runs = branch.state.add_owner(), dict[tuple[str, ...], SharedRun]()
        try:
            replies = [read_reply(turns, sample, before) for sample in samples]
            runs, is_refused = self._run_calls(node.search, state, replies, keep=keep)
            try:
                await await_external(node, [run.outcome for run in runs.values()])
            finally:
                count_actions(node.search, runs)
            children = []
            for sample, reply in zip(samples, replies, strict=True):
                calls = call_keys(reply)
                if reply.calls and calls not in runs:
                    continue  # the budget has no room for them
                outcome = runs[calls].outcome.result() if calls else None
                step = make_step(sample, reply, outcome, self._accepts_cut)
                if step.failure:
                    fail_step(sample, step)
                    continue
                child, after = sample, None
                if outcome is None:
                    after = state.add_owner()
                else:
                    child = sample.extend(render_outcome(turns, reply, outcome, sample))
                    if outcome.state is not None:
                        if not self._accepts_cut and is_full(child):
                            fail_step(child, replace(step, end="failed", failure=NO_ROOM))
                            continue
                        after = state.follow(calls, runs[calls], outcome.state)
                child.branch = Branch((*branch.actions, *calls), step, after)
                child.data = step.to_json()
                children.append(child)
            if is_refused:
                node.search.refuse_actions()
        finally:
            for run in runs.values():
                run.leave()
            state.release()
            if not keep:
                branch.release()
        return children

    async def _sample(
        self, node: SearchNode, branch: Branch, n: int, params: dict[str, Any]
    ) -> list[SearchNode]:
        """Return n replies; none if the model's context is full, which ends the branch.

        This waits for the world first if the episode begins at the root and no action has run:
        without the world, all branches would fail.

        Args:
            node: The node to sample from.
            branch: What the agent keeps for it.
            n: Replies to sample.
            params: Sampling parameters.
        """
        root_branch = node.path[0].branch
        if (
            branch.state is not None
            and isinstance(root_branch, Branch)
            and root_branch.state is branch.state
        ):
            await await_external(node, [branch.state.state])
            if branch.state is None:  # the node was dropped meanwhile
                return []
        if self._forces_calls:
            turns = self.turns_of(node)
            grammar = turns.replies.call_grammar(turns.tools, is_single=True)
            # A sample below one of the same grammar would continue that one's text.
            num_steps = sum(step_of(above) is not None for above in node.path)
            params = {**params, "grammar": f"{grammar}\n// turn {num_steps % 2}"}
        try:
            return await node.sample(n, **params)
        except ContextError:  # the context of a model on a server is not known before
            if not branch.actions or node.children:
                raise
            fail_node(node, NO_ROOM)
            return []

    def _run_calls(
        self,
        search: BudgetedSearch,
        state: SharedState,
        replies: Sequence[Reply],
        *,
        keep: bool,
    ) -> tuple[dict[tuple[str, ...], SharedRun], bool]:
        """Start the distinct calls of replies; return them, and whether the budget refused some.

        Args:
            search: The search, whose budget counts the actions.
            state: The state from which they run.
            replies: The replies.
            keep: Whether the state may be used later.
        """
        groups = {call_keys(reply): reply.calls for reply in replies if reply.calls}
        # The node and this call own the state.
        is_last = not keep and state.num_owners == 2 and len({*map(call_keys, replies)}) == 1
        runs: dict[tuple[str, ...], SharedRun] = {}
        for key, calls in groups.items():
            run = state.runs.get(key)
            if run is None:
                if not search.fits_actions(len(calls)):
                    return runs, True
                search.num_pending_actions += len(calls)
                run = SharedRun(self._worlds.run(state.state, calls, is_last=is_last))
                state.runs[key] = run
            runs[key] = run.join()
        return runs, False

    def instruct(self, node: SearchNode, text: str) -> SearchNode:
        """Append a message of the user to a node where the episode goes on; return the new node.

        If the message leaves no room in the model's context, the first step from that node fails,
        or the whole search if no action has run yet.

        Args:
            node: The node.
            text: The message.
        """
        branch = branch_of(node)
        if branch.state is None or (branch.step is not None and branch.step.end):
            raise InputError(
                f"the episode ended at node {node.key!r}; call instruct with an earlier node"
            )
        child = node.extend(self.turns_of(node).render_message(text))
        child.branch = Branch(branch.actions, None, branch.state.add_owner())
        return child

    async def play(self, node: SearchNode, n: int = 1) -> list[SearchNode]:
        """Play n episodes from a node to their ends, and return the last node of each.

        An episode of `max_steps` steps is cut off; its last node is no end. Failed episodes are not
        returned.

        Args:
            node: The node.
            n: Episodes to play.
        """

        async def play_on(last: SearchNode) -> list[SearchNode]:
            for _ in range(self._max_steps - 1):
                if self.done(last):
                    break
                following = await self.act(last, keep=False)
                if not following:
                    return []
                (last,) = following
            return [last]

        ends = await gather(map(play_on, await self.act(node, n)))
        return [last for end in ends for last in end]

    # What strategies take

    def propose(self, n: int) -> Propose:
        """Return a function that takes n steps from a node."""
        check_int("n", n, minimum=1)

        async def propose(node: SearchNode) -> Sequence[SearchNode]:
            return await self.step(node, n)

        return propose

    async def step(self, node: SearchNode, n: int) -> list[SearchNode]:
        """Take n steps from a node; none where the episode is over."""
        return [] if self.done(node) else await self.act(node, n)

    def done(self, node: SearchNode) -> bool:
        """Return whether the episode is over at a node, other than by a failure."""
        step = step_of(node)
        return step is not None and step.end in ("answer", "done")

    def state(self, node: SearchNode) -> Hashable:
        """Return the state of a node: the actions before it, and the answer if it has one."""
        branch = branch_of(node)
        step = branch.step
        answer = step.reply.text if step is not None and step.end == "answer" else None
        return branch.actions, answer

    async def evaluate(self, nodes: Sequence[SearchNode]) -> list[float]:
        """Return the rewards of nodes: what the environment thinks of their states; 0 if nothing.

        Nodes fail as in `rewards`.
        """
        return [0.0 if reward is None else reward for reward in await self.rewards(nodes)]

    def evaluate_with(
        self,
        evaluate: Evaluate,
        combine: Callable[[float, float], float] = lambda reward, value: (reward + value) / 2,
    ) -> Evaluate:
        """Return an evaluation by the environment's rewards and by another one, such as a verifier.

        A node whose state cannot be observed fails, as in `rewards`, and has the value 0.

        Args:
            evaluate: The other evaluation; it alone counts where the environment gives no reward.
            combine: Combines the reward and the other value. Default: their mean.
        """

        async def evaluate_both(nodes: Sequence[SearchNode]) -> list[float]:
            rewards = await self.rewards(nodes)
            values = await evaluate_nodes(nodes, evaluate)
            return [
                0.0 if node.pruned else value if reward is None else combine(reward, value)
                for node, reward, value in zip(nodes, rewards, values, strict=True)
            ]

        return evaluate_both

    async def rewards(self, nodes: Sequence[SearchNode]) -> list[float | None]:
        """Return the reward of each node; None where the environment gives none.

        A node whose state cannot be observed fails, as a step does.

        Raises:
            WorldError: The state of a root, or of a node with children, cannot be observed.
        """
        futures: dict[SharedState, Future[Observation]] = {}
        for node in nodes:
            state = branch_of(node).state
            if find_last_reward(node) is None and state is not None and state not in futures:
                futures[state] = self._worlds.observe(state.state)
        observations: dict[SharedState, Observation] = {}
        if futures:
            results = await await_external(nodes[0], list(futures.values()))
            observations = dict(zip(futures, results, strict=True))
        rewards = []
        for node in nodes:
            reward, state = find_last_reward(node), branch_of(node).state
            if reward is None and state in observations:
                reward, failure = observations[state].reward, observations[state].failure
                if failure:
                    fail_node(node, failure)
                    reward = None
            rewards.append(None if reward is None else float(reward))
        return rewards

    async def observe(self, node: SearchNode) -> Observation:
        """Return what the environment shows at a node where the episode goes on.

        Raises:
            WorldError: The environment fails.
        """
        state = branch_of(node).state
        if state is None:
            raise InputError(f"node {node.key!r} no longer has a world")
        (observation,) = await await_external(node, [self._worlds.observe(state.state)])
        if observation.failure:
            raise WorldError(observation.failure)
        return observation

    async def use_world(
        self,
        node: SearchNode,
        make: Callable[[], Awaitable[World]],
        use: Callable[[World], Awaitable[T]],
    ) -> T:
        """Return what a function returns for a world, such as a score, also once time is up.

        Args:
            node: The node that the call is about.
            make: Opens the world.
            use: The function. It may change the world, which is closed afterwards.
        """
        future = self._worlds.use(make, use)
        while not future.done():
            with suppress(BudgetReached):
                await await_external(node, [future])
        return future.result()

    def turns_of(self, node: SearchNode) -> ToolTurns:
        """Return what reads replies and renders results for the model of a node's search."""
        if self.turns is None:
            if (tokenizer := getattr(node.search.backend, "tokenizer", None)) is None:
                raise InputError(
                    "tool calls require a tokenizer, but this search has no tokenizer; pass "
                    "turns=ToolTurns(tokenizer, environment.tools) to the agent"
                )
            self.turns = ToolTurns(tokenizer, self.environment.tools, template=self._template)
        return self.turns
