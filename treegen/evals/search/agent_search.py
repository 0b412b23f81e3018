"""Searches whose steps are tool calls: a task's environment, an agent, and a method."""

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from treegen.common.formatting import replace_surrogates
from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.search.action_journal import LOCK_FILE, ActionJournal, Episode
from treegen.evals.search.agent_task import AgentTask, Assessment, EnvironmentOptions
from treegen.evals.search.job import SearchJob
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.evals.search.searcher import Searcher, TaskSearch, ValueFunction
from treegen.prompts.replies.types import ToolCall
from treegen.runs import SearchRunDir, open_for_append
from treegen.search.budget import BudgetReached, StopReason
from treegen.search.environments.agent import Agent
from treegen.search.environments.branch import step_of
from treegen.search.environments.protocol import Environment, call_key, describe_failure
from treegen.search.environments.states import MAX_SECONDS
from treegen.search.tree.node import SearchNode
from treegen.search.tree.records import SearchTree
from treegen.search.tree.result import SearchOutcome, SearchResult

WORLDS_FOLDER: Final = "worlds"


@dataclass(frozen=True, slots=True)
class RunAgent:
    """The agent of a run."""

    job: SearchJob
    agent: Agent
    environment: Environment
    """The environment itself, without the journal."""
    journaled: JournaledEnvironment
    """The environment with the journal."""
    begun: Sequence[tuple[str, str]]
    """Actions of earlier processes that began and have no end, as searches and their keys."""
    scores_worlds: bool
    """Whether the world at the end of an episode decides its score."""
    assessments: dict[str, Assessment] = field(default_factory=dict)
    """Scores of worlds by the names of searches."""

    @property
    def task(self) -> AgentTask:
        """The task of the run."""
        assert isinstance(self.job.task, AgentTask)
        return self.job.task

    def describe_environment(self) -> list[str]:
        """Return lines for people: the sandbox of the environment, and how its worlds are forked.

        An environment without a method `describe` has none.

        Raises:
            InputError: the method does not return a list of texts.
        """
        lines: Any = getattr(self.environment, "describe", list)()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise InputError(
                f"the environment's describe() must return a list of texts, got {lines!r:.80}"
            )
        return lines

    def describe_resume(self) -> list[str]:
        """Return what happens to the actions that the run has stored, for people."""
        num = self.journaled.journal.num_stored
        lines = []
        if self.begun:
            (search, key), *more_actions = self.begun
            more = f" and during {len(more_actions):,} other actions" if more_actions else ""
            lines.append(
                f"the run stopped during the action {key:.100} of {search}{more}; treegen runs an "
                "unfinished action again, from the state before the action, if the search needs "
                "the result"
            )
        if num:
            lines.append(f"{num:,} actions are stored; treegen reads their results")
        if (num or self.begun) and not self.journaled.keeps_snapshots:
            lines.append(
                f"the environment {self.job.settings.environment} keeps no snapshots, so treegen "
                "runs the stored actions of a branch again if the branch continues"
            )
        return lines

    def search(
        self, interrupted: Callable[[], object], value_function: ValueFunction | None
    ) -> "AgentSearch":
        """Return the function that searches a problem.

        Args:
            interrupted: As for `TaskSearch`.
            value_function: As for `TaskSearch`.
        """
        return AgentSearch(self, interrupted, value_function)

    def finish(self, search: str) -> None:
        """Let the snapshots of a search be deleted, because its record is stored."""
        self.journaled.finished.append(search)

    async def score_world(
        self,
        root: SearchNode,
        episode: Episode,
        best: SearchNode,
        interrupted: Callable[[], object],
    ) -> None:
        """Score the world at the end of an episode, for `assess`.

        If that fails, the episode counts as not solved, with the failure in its scores. But if the
        run is interrupted meanwhile, the search counts as interrupted, and a resumed run tries
        again.

        Args:
            root: The root of the search.
            episode: The episode.
            best: The last node of the episode.
            interrupted: As for `TaskSearch`.
        """
        pure = self.environment.traits.pure_tools
        path = tuple(
            call_key(call)
            for node in best.path
            if (step := step_of(node)) is not None
            for call in step.reply.calls[: len(step.observations)]
            if call.name not in pure
        )
        try:
            assessment = await self.agent.use_world(
                root,
                lambda: self.journaled.revive(episode, path),
                lambda world: self.task.assess_world(episode.problem, world, self.environment),
            )
        except Exception as error:
            if interrupted():
                by = StopReason.INTERRUPTED
                root.search.stopped = BudgetReached(by.value, by)  # whatever ended it before
                return
            assessment = Assessment(False, {"failure": describe_failure(error)})
            warnings.warn(
                f"the best episode of {episode.search} cannot be scored and counts as not solved: "
                f"{describe_failure(error)}",
                RuntimeWarning,
                stacklevel=1,
            )
        self.assessments[episode.search] = assessment

    def assess(self, problem: Problem, result: SearchResult) -> Assessment:
        """Return the official score of a search's best episode.

        Args:
            problem: The problem.
            result: The result of the search, which has an episode.
        """
        if self.scores_worlds:
            return self.assessments.get(result.name, Assessment(False))
        assert result.best is not None
        return self.task.assess(problem, actions_of(result.tree, result.best), self.environment)


def list_worlds(run: SearchRunDir) -> list[Path]:
    """Return what the folder of worlds and snapshots of a run contains."""
    folder = run.path / WORLDS_FOLDER
    return list(folder.iterdir()) if folder.is_dir() else []


@contextmanager
def open_agent(
    job: SearchJob, run: SearchRunDir, execution: ExecutionOptions | None
) -> Iterator[RunAgent]:
    """Open the environment and the journal of a run, and yield its agent.

    Args:
        job: The job of the run.
        run: The run directory.
        execution: Permission to run programs; None without it.

    Raises:
        InputError: The environment needs a permission that it does not have.
    """
    task, settings = job.task, job.settings
    assert isinstance(task, AgentTask) and settings.environment is not None
    folder = run.path / WORLDS_FOLDER
    options = EnvironmentOptions(name=settings.environment, execution=execution, folder=folder)
    with open_for_append(run.path / run.actions_file, LOCK_FILE) as file:
        journal = ActionJournal(file)
        environment = task.make_environment(job.data, options)
        keeps = options.backend in task.keep_snapshots
        scores_worlds = options.backend in task.scored_worlds
        journaled = JournaledEnvironment(
            environment, journal, keeps_snapshots=keeps, keeps_ends=scores_worlds
        )
        is_stored = {name: key in run.done for name, key in job.searches.items()}
        journaled.finished.extend(name for name, stored in is_stored.items() if stored)
        begun = journal.list_unfinished([name for name, stored in is_stored.items() if not stored])
        with Agent(
            journaled,
            max_live=settings.max_live,
            max_steps=settings.depth,
            max_seconds=(settings.depth + 3) * MAX_SECONDS,  # a branch may be replayed
            forces_calls=settings.forces_calls,
        ) as agent:
            yield RunAgent(job, agent, environment, journaled, begun, scores_worlds)
            journaled.is_finished = run.missing <= 0


def actions_of(tree: SearchTree, node: int) -> list[ToolCall]:
    """Return the actions of the episode that ends at a node.

    Args:
        tree: The tree of the search.
        node: The id of the node.
    """
    actions = []
    for index in tree.path(node):
        step: Any = tree.nodes[index].data
        if isinstance(step, dict):
            ran = step.get("calls", ())[: len(step.get("observations", ()))]
            actions += [ToolCall(call["name"], call["arguments"]) for call in ran]
    return actions


def answer_of(tree: SearchTree, node: int) -> str | None:
    """Return the text of the reply that ended an episode; None if no reply did.

    Args:
        tree: The tree of the search.
        node: The id of the node.
    """
    step: Any = tree.nodes[node].data
    is_answer = isinstance(step, dict) and step.get("end") == "answer"
    return str(step.get("text", "")) if is_answer else None


class AgentSearch(TaskSearch):
    """Searches any of a task's problems by steps of an agent."""

    def __init__(
        self,
        run: RunAgent,
        interrupted: Callable[[], object],
        value_function: ValueFunction | None,
    ) -> None:
        job = run.job
        super().__init__(job.task, job.data, job.settings, interrupted, value_function)
        self._run = run

    async def _search(self, root: SearchNode, problem: Problem) -> SearchOutcome:
        run = self._run
        episode = Episode(root.search.name, problem, lambda: root.search.stopped is None)
        run.agent.begin(root, episode)
        how = self._value_function or ValueFunction(
            run.agent.evaluate, 0.0, 1.0, lambda value: min(max(value, 0.0), 1.0)
        )
        outcome = await AgentSearcher(run, problem, root, how, self._method).search()
        stopped = root.search.stopped
        is_interrupted = stopped is not None and stopped.by is StopReason.INTERRUPTED
        if run.scores_worlds and outcome.best is not None and not is_interrupted:
            await run.score_world(root, episode, outcome.best, self._interrupted)
        return outcome


class AgentSearcher(Searcher):
    """A problem with the functions that strategies call, for steps of an agent."""

    is_agent = True

    def __init__(
        self, run: RunAgent, problem: Problem, root: SearchNode, how: ValueFunction, method: Any
    ) -> None:
        super().__init__(run.task, problem, run.job.settings, root, how, method)
        self._agent = run.agent

    def done(self, node: SearchNode) -> bool:
        """Return whether the episode is over at a node."""
        return self._agent.done(node)

    def state(self, node: SearchNode) -> Hashable:
        """Return the state of a node: the actions before it, and the answer if it has one."""
        return self._agent.state(node)

    def answer(self, node: SearchNode) -> str | None:
        """Return the reply that ended the episode; None if no reply did."""
        step = step_of(node)
        return step.reply.text if step is not None and step.end == "answer" else None

    async def step(self, node: SearchNode, n: int) -> Sequence[SearchNode]:
        """Take n steps from a node."""
        self._check()
        return await self._agent.step(node, n)

    async def finish(self, node: SearchNode, n: int) -> Sequence[SearchNode]:
        """Play n episodes from a node to their ends."""
        self._check()
        return [node] if self.done(node) else await self._agent.play(node, n)

    def instruct(self, node: SearchNode, text: str) -> SearchNode:
        """Append a message of the user to a node."""
        return self._agent.instruct(node, text)

    async def ask(self, node: SearchNode, text: str, max_tokens: int) -> str:
        """Return the model's answer to a question about the problem and the episode at a node.

        It counts for the budget, but it is not part of the tree.

        Args:
            node: The node.
            text: The question.
            max_tokens: Maximum tokens of the answer.
        """
        self._check()
        steps = [step.describe() for above in node.path if (step := step_of(above)) is not None]
        full_text = "\n\n".join([self._problem.question, "\n".join(steps), text])
        prompt = self._agent.turns_of(node).render_question(replace_surrogates(full_text))
        digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
        with node.search.temporary_prompt(prompt, key=f"ask {digest}") as question:
            (answer,) = await question.sample(1, stop=(), max_tokens=max_tokens)
            return answer.text

    async def propose(self, node: SearchNode) -> Sequence[SearchNode]:
        """Take as many steps from a node as the settings say."""
        return await self.step(node, self._settings.expand)

    async def evaluate(self, nodes: Sequence[SearchNode]) -> list[float]:
        """Return the values of nodes in the way named by the settings."""
        self._check()
        return [float(value) for value in await self._value.evaluate(nodes)]
