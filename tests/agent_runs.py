"""Runs of agent tasks whose model is a scripted policy."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from agent_cases import call_text, chat_tokenizer, drawn
from agent_policies import call, next_action
from puzzle_model import Results
from toy_search import run_all

from treegen.common.bounded.templates import render_chat
from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.evals.identity import run_settings
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.search.agent_search import open_agent
from treegen.evals.search.job import SearchJob, load_search_job
from treegen.evals.search.run import run_searches, write_search_results
from treegen.evals.search.settings import resolve_search_settings
from treegen.evals.task import Task
from treegen.prompts.plan.draws import row_seed
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tree import Parts
from treegen.runs import SearchRunDir
from treegen.search.backend import BackendSample, Context
from treegen.search.budget import Budget, SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchResult
from treegen.tasks.agents import repair, text_world
from treegen.tasks.agents.functions import FUNCTIONS

Policy = Callable[[Problem, str, int], str]
"""Returns the reply for a problem, a context and a seed."""


@dataclass(eq=False)
class ScriptedContext:
    text: str
    num_tokens: int


@dataclass
class ScriptedBackend:
    """Draws whole replies of a policy; a token is a word."""

    reply: Callable[[str, int], str]
    tokenizer: Any

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        assert isinstance(content, str)
        return ScriptedContext(content, len(content.split()))

    def extend(self, context: Context, content: str | Parts) -> Context:
        assert isinstance(context, ScriptedContext) and isinstance(content, str)
        return ScriptedContext(context.text + content, context.num_tokens + len(content.split()))

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
        *,
        continues: bool = False,
    ) -> Sequence[BackendSample | None]:
        assert isinstance(context, ScriptedContext)
        samples = []
        for index in indices:
            seed = row_seed(params.seed, search.origin_of(key), index)
            text = self.reply(context.text, seed)
            search.usage.tokens_decoded += len(text.split())
            done = Completion(key, index, seed, text, (), (), "stop", None)
            samples.append(BackendSample(done, self.extend(context, text)))
        return samples

    async def score(self, context: Context, texts: Sequence[str], search: BudgetedSearch) -> Any:
        raise NotImplementedError

    def release(self, context: Context) -> None: ...

    def cancel(self, search: BudgetedSearch) -> None: ...


@dataclass
class ScriptedLLM:
    """What the runner needs of an LLM."""

    policy: Policy
    problems: Mapping[str, Problem]
    tokenizer: Any = field(default_factory=chat_tokenizer)

    def search_stream(
        self,
        fn: SearchFn,
        prompts: Sequence[tuple[str, Any]],
        params: SamplingParams,
        *,
        concurrency: int,
        budget: Budget,
        tools: Sequence[Any] | None,
    ) -> Results:
        return Results(self._results(fn, prompts, params, budget, tools), len(prompts))

    def _results(
        self, fn: SearchFn, prompts: Any, params: SamplingParams, budget: Budget, tools: Any
    ) -> Generator[SearchResult, None, None]:
        for name, messages in prompts:
            text = render_chat(self.tokenizer, messages, tools=tools, add_generation_prompt=True)
            problem = self.problems[name.partition(" #")[0]]
            backend = ScriptedBackend(partial(self.policy, problem), self.tokenizer)
            search = Search(backend, text, name=name, params=params, budget=budget)
            yield from run_all([search], fn)


def calls_in(context: str) -> list[ToolCall]:
    """The calls in a context."""
    texts = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", context, re.DOTALL)
    values = map(json.loads, texts)
    return [ToolCall(value["name"], value["arguments"]) for value in values]


@lru_cache(maxsize=4096)
def _world_after(answer: str, calls: str) -> text_world.TextWorld:
    world = text_world.make_world(**json.loads(answer))
    for name, arguments in json.loads(calls):
        world.run(ToolCall(name, arguments))
    return world


def walker(noise: float) -> Policy:
    """A policy of text worlds that takes a random action now and then, and the right one else."""

    def reply(problem: Problem, context: str, seed: int) -> str:
        rng = drawn(problem.id, context, seed)
        done = json.dumps([[each.name, each.arguments] for each in calls_in(context)])
        world = _world_after(problem.answer, done)
        action = _stray(world, rng) if rng.random() < noise else next_action(world)
        return call_text(action)

    return reply


def _stray(world: text_world.TextWorld, rng: random.Random) -> ToolCall:
    """Any action that is possible here or looks so."""
    here = world._here()
    things = list(world.things)
    options = [call("go", direction=way) for way in world.exits[world.room]]
    options += [call("open", place=place) for place in here]
    options += [call("take", thing=thing) for thing in things if world.things[thing] in here]
    options += [
        call("put", thing=thing, place=rng.choice(here))
        for thing in things
        if world.things[thing] == text_world.HELD
    ]
    return rng.choice(options)


@lru_cache(maxsize=4096)
def _files_after(answer: str, calls: str) -> tuple[tuple[str, str], ...]:
    files = dict(_puzzle(answer).files)
    for name, arguments in json.loads(calls):
        if name == "write_file":
            files[arguments["path"]] = arguments["text"]
    return tuple(files.items())


@lru_cache(maxsize=512)
def _puzzle(answer: str) -> repair.RepairPuzzle:
    return repair.make_puzzle(**json.loads(answer))


def mender(noise: float) -> Policy:
    """A policy of repair puzzles that often writes another wrong text, or submits too early."""

    def reply(problem: Problem, context: str, seed: int) -> str:
        rng = drawn(problem.id, context, seed)
        puzzle = _puzzle(problem.answer)
        done = json.dumps([[each.name, each.arguments] for each in calls_in(context)])
        files = dict(_files_after(problem.answer, done))
        wrong = [path for path in files if files[path] != puzzle.solution[path]]
        if not wrong or rng.random() < noise / 4:
            return call_text(call("submit"))
        path = rng.choice(sorted(files)) if rng.random() < noise else rng.choice(wrong)
        text = puzzle.solution[path]
        if rng.random() < noise:
            function = next(f for f in FUNCTIONS if f"{f.name}.py" == path)
            text = text.replace(*rng.choice(function.bugs))
        return call_text(call("write_file", path=path, text=text))

    return reply


def load_job(
    task: str | Task, method: str, *, extra: Mapping[str, str], **choices: Any
) -> SearchJob:
    """A job of an agent task."""
    settings = {"task": task, "model": "made-up", "method": method, "extra": dict(extra), **choices}
    return load_search_job(resolve_search_settings(settings))


def run_job(
    job: SearchJob,
    policy: Policy,
    path: Path,
    *,
    execution: ExecutionOptions | None = None,
    resume: bool = False,
    stop: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Run the searches that are missing, and return the results."""
    settings = run_settings(job, dtype="float32", fingerprint="0")
    make = SearchRunDir.resume if resume else SearchRunDir.create
    llm = ScriptedLLM(policy, {problem.id: problem for problem in job.data.problems})
    with make(path, settings) as run:
        with open_agent(job, run, execution) as agent:
            for _ in run_searches(job, run, llm, agent=agent, stop=stop):  # type: ignore[arg-type]
                pass
        return write_search_results(job, run)


FIGURES: Mapping[str, tuple[Policy, Mapping[str, str]]] = {
    "text-world": (walker(0.5), {"problems": "60", "level": "hard"}),
    "repair": (mender(0.6), {"problems": "60", "level": "hard"}),
}


def measure(
    folder: Path, methods: Sequence[str] = ("best-of-n", "beam", "mcts")
) -> Generator[str, None, None]:
    """Search each task by several methods with one budget of actions; yield rows of a table."""
    for task, (policy, extra) in FIGURES.items():
        for method in methods:
            job = load_job(
                task,
                method,
                extra=extra,
                num_samples=8,
                width=4,
                expand=2,
                depth=80,
                temperature=0.7,
                budget={"actions": 240 if task == "text-world" else 40},
            )
            results = run_job(
                job, policy, folder / f"{task}-{method}", execution=ExecutionOptions()
            )
            solved, cost = results["solved"], results["cost"]["actions"]["mean"]
            yield (
                f"| `{task}` | `{method}` | {results['num_solved']}/60 | {solved['value']:.3f} "
                f"| {solved['low']:.3f} to {solved['high']:.3f} | {cost:.1f} |"
            )
