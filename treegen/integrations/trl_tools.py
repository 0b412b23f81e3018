"""Rollouts of TRL's GRPOTrainer in which the model acts in an environment by tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from treegen.common.checks import check_counts
from treegen.common.lifetimes import Closeable
from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.integrations.trl import RolloutResult, Rollouts
from treegen.llm import LLM
from treegen.prompts.tool_turns import ToolTurns
from treegen.prompts.tree import chat_arguments
from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import AgentStep, step_of
from treegen.search.environments.protocol import Environment, check_environment
from treegen.search.event_loop import gather
from treegen.search.live.pending import LiveContext
from treegen.search.session import flat_content
from treegen.search.tree.node import SearchNode

EpisodeEnd = Literal["answer", "done", "length", "turns", "actions", "failed"]


class ToolRollouts(Rollouts, Closeable):
    """A rollout function of GRPOTrainer with several turns and tools.

        with ToolRollouts(environment) as rollout:
            trainer = GRPOTrainer(..., reward_funcs=reward, rollout_func=rollout)
            trainer.train()

    The model samples until it calls a tool in its own format. The environment runs the call, and
    the result is appended as the chat template shows it. The rollouts of a prompt share the
    environment's first state and all equal calls from equal states, as those of `Agent` do.

    TRL gets the whole conversation after the prompt as the completion. Its `env_mask` is 0 at
    tokens that the model did not write, so they are not trained on. Reward functions get:

    - `environment_reward`: the environment's reward of the last state, or the last one that it
      gave; None if it gave none, or has failed
    - `episode_end`: "answer" (a reply without a call), "done" (the environment ended it), "length",
      "turns", "actions" (a limit ended it) or "failed" (the environment has failed)
    - `num_actions`: the calls that have run

    An error during a rollout closes the environment, because it ends the training.

    Attributes:
        agent: The agent that plays the episodes.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        problem_of: Callable[[Any], Any] = lambda prompt: prompt,
        max_turns: int = 8,
        max_actions: int | None = None,
        tool_format: str | None = None,
        max_live: int = 8,
        max_seconds: float = 300.0,
        **options: Any,
    ) -> None:
        """Store the options.

        Args:
            environment: Starts the worlds. `close` closes it.
            problem_of: Returns what `Environment.start` gets for a prompt, which is a list of
                messages. Default: the prompt.
            max_turns: Maximum number of replies of an episode.
            max_actions: An episode that has made so many calls ends. Default: no limit.
            tool_format: A name of `TOOL_FORMATS`, for a model whose chat template does not tell how
                it writes calls.
            max_live: As for `Agent`.
            max_seconds: As for `Agent`.
            **options: As for `Rollouts`, such as memory.

        Raises:
            InputError: An option is unknown, or `environment` is no environment or has no tools.
        """
        super().__init__(**options)
        check_counts(max_turns=max_turns, max_actions=max_actions)
        check_environment(environment)
        if not environment.tools:
            raise InputError("the environment has no tools; use treegen.integrations.trl.rollout")
        self._problem_of, self._max_turns, self._max_actions = problem_of, max_turns, max_actions
        self._tool_format = tool_format
        self._turns: WeakKeyDictionary[Any, ToolTurns] = WeakKeyDictionary()
        self.agent = Agent(
            environment, max_live=max_live, max_seconds=max_seconds, accepts_cut_replies=True
        )

    def close(self) -> None:
        """Close all worlds, delete all snapshots, and close the environment."""
        self.agent.close()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> RolloutResult:
        """Play one episode per prompt, by the current weights of the trainer's model.

        Args:
            prompts: The prompts, as TRL passes them.
            trainer: The trainer.

        Raises:
            InputError: The trainer, one of its settings, or the model's chat template is not
                supported.
            WorldError: A world cannot be started.
            TreegenError: As for `Rollouts`.
        """
        try:
            return super().__call__(prompts, trainer)
        except BaseException:
            self.close()
            raise

    def _encode(self, prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
        """Return the token ids of chats that show the tools."""
        _check_trainer(trainer)
        tools, tokenizer = self.agent.environment.tools, trainer._tokenizer
        if trainer not in self._turns:
            self._turns[trainer] = turns = ToolTurns(
                tokenizer,
                tools,
                template=trainer.chat_template_kwargs,
                tool_format=self._tool_format,
            )
            if turns.replies.format is None and not turns.replies.by_template:
                raise InputError(
                    "cannot determine the tool-call format from this model's chat template; set "
                    f"the format with {arg('tool_format=')}"
                )
        self.agent.turns = self._turns[trainer]
        template = chat_arguments(tools, trainer.chat_template_kwargs)
        if texts := [prompt for prompt in prompts if isinstance(prompt, str)]:
            raise InputError(
                f"the prompt {texts[0]!r:.60} is a string, but tools need chat messages; pass "
                "lists of messages"
            )
        return [list(map(int, flat_content(chat, tokenizer, template))) for chat in prompts]

    def _draw(
        self,
        llm: LLM,
        prompts: Sequence[Any],
        prompt_ids: list[list[int]],
        params: SamplingParams,
    ) -> RolloutResult:
        if params.stop:
            raise InputError(
                "stop_strings is not supported with tools, because each reply already ends at a "
                "tool call; remove stop_strings"
            )
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(json.dumps(prompt, sort_keys=True, default=str), []).append(index)
        indices_of_problems = list(groups.values())
        episodes: dict[int, _Episode] = {}

        async def play(root: SearchNode) -> None:
            indices = indices_of_problems[int(root.search.name)]
            self.agent.begin(root, self._problem_of(prompts[indices[0]]))
            num = len(indices) if params.temperature else 1  # greedy rollouts are all the same
            await self.agent.act(root, num, keep=False, max_tokens=params.max_tokens)
            limit = min(root.num_context_tokens + params.max_tokens, llm.spec.context_length)
            ends = await gather([self._play(sample, limit) for sample in root.children])
            episodes.update(zip(indices, ends * (len(indices) // num), strict=True))

        problems = [
            (str(at), prompt_ids[indices[0]]) for at, indices in enumerate(indices_of_problems)
        ]
        rows = max(map(len, indices_of_problems))
        with llm.search_stream(play, problems, params, rows=rows) as results:
            for result in results:
                if result.exception is not None:
                    raise result.exception
        played = [episodes[index] for index in range(len(prompts))]
        return RolloutResult(
            prompt_ids=prompt_ids,
            completion_ids=[episode.tokens for episode in played],
            logprobs=[episode.logprobs for episode in played],
            env_mask=[episode.mask for episode in played],
            environment_reward=[episode.reward for episode in played],
            episode_end=[episode.end for episode in played],
            num_actions=[episode.num_actions for episode in played],
        )

    async def _play(self, sample: SearchNode, limit: int) -> _Episode:
        """Play an episode from its first reply to its end, and free its nodes.

        Args:
            sample: The reply.
            limit: Maximum number of tokens, including those of the prompt.
        """
        episode, first = _Episode(), sample
        while True:
            # The agent extends replies with calls by their results.
            node = sample.children[0] if sample.children else sample
            episode.add_reply(sample, step_of(node))
            episode.end = self._find_end(episode, node, limit)
            if episode.end is not None:
                break
            episode.add_results(sample, node)
            num_tokens = limit - node.num_context_tokens
            await self.agent.act(node, keep=False, max_tokens=num_tokens)
            (sample,) = node.children
        if episode.end != "failed":
            (reward,) = await self.agent.rewards([node])
            episode.reward = episode.reward if reward is None else reward
            if (step := step_of(node)) is not None and step.end == "failed":
                episode.end = "failed"
        if episode.end == "failed":
            episode.reward = None
        first.free()
        return episode

    def _find_end(self, episode: _Episode, node: SearchNode, limit: int) -> EpisodeEnd | None:
        """Return why an episode ends at a node; None if it goes on.

        Args:
            episode: The episode.
            node: The end of its last step.
            limit: Maximum number of tokens, including those of the prompt.
        """
        step = step_of(node)
        assert step is not None
        if step.end:
            return "length" if step.end == "answer" and node.finish_reason == "length" else step.end
        if episode.num_turns >= self._max_turns:
            return "turns"
        if self._max_actions is not None and episode.num_actions >= self._max_actions:
            return "actions"
        return "length" if node.num_context_tokens >= limit else None


@dataclass(slots=True)
class _Episode:
    """The tokens of an episode after its prompt, and how it went."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Those of the draws; 0 for tokens that the model did not write."""
    mask: list[int] = field(default_factory=list)
    """1 for tokens that the model wrote, 0 for others."""
    reward: float | None = None
    end: EpisodeEnd | None = None
    num_turns: int = 0
    num_actions: int = 0

    def add_reply(self, sample: SearchNode, step: AgentStep | None) -> None:
        """Append a reply, including the token that has ended it.

        Args:
            sample: The reply.
            step: What its calls have done.
        """
        assert step is not None
        self.tokens += sample.tokens
        self.logprobs += sample.logprobs
        self.mask += [1] * len(sample.tokens)
        self.num_turns += 1
        self.num_actions += len(step.observations)
        self.reward = self.reward if step.reward is None else step.reward

    def add_results(self, sample: SearchNode, node: SearchNode) -> None:
        """Append what follows a reply.

        Args:
            sample: The reply.
            node: The node that has the results of its calls.
        """
        assert sample.parent is not None
        start = sample.num_context_tokens
        results = cast(LiveContext, node._live()).path_tokens()[start:]
        ending = list(sample.tokens[start - sample.parent.num_context_tokens :])
        if results[: len(ending)] == ending:
            results = results[len(ending) :]
        else:  # the template ends replies with calls by another token, which the model reads
            for values in (self.tokens, self.logprobs, self.mask):
                del values[len(values) - len(ending) :]
        self.tokens += results
        self.logprobs += [0.0] * len(results)
        self.mask += [0] * len(results)


def _check_trainer(trainer: Any) -> None:
    """Raise InputError if a trainer would train on results of tools, or run tools itself."""
    if not isinstance(trainer, import_module("trl").GRPOTrainer):
        raise InputError(
            f"{type(trainer).__name__} is not supported with tools, because the trainer does not "
            "mask tool results; use GRPOTrainer"
        )
    if trainer.tools or trainer.environment_factories:
        raise InputError(
            "tools and environment_factory of the trainer are not supported, because the "
            "rollouts run the tools of their environment; remove tools and environment_factory"
        )
