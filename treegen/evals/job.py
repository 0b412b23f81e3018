"""An evaluation before weights are loaded: its problems, its prompts and their plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from treegen.common.params import SamplingParams
from treegen.errors import CapacityError, InputError
from treegen.evals.answer_types import check_ready
from treegen.evals.arguments import check_arguments, configure_task, known_arguments
from treegen.evals.chat import as_chat
from treegen.evals.config.base import BaseSettings
from treegen.evals.config.eval_settings import EvalSettings, default_sampling
from treegen.evals.multiple_choice import (
    ChoicePrompt,
    check_settings,
    choice_prompts,
    choice_requests,
    is_multiple_choice,
)
from treegen.evals.problem import Problem, readable_reference
from treegen.evals.registry import get_task
from treegen.evals.requests import OwnRequests
from treegen.evals.selection import select_if_needed
from treegen.evals.task import Task, TaskData, TaskOptions
from treegen.evals.task_calls import load_data, wrap_task_method
from treegen.evals.truncation import barest, truncate_prompts
from treegen.prompts.plan.plan import Plan
from treegen.prompts.tree import Node, prompts_of

# Importing torch takes seconds. Reading and checking the data does not need it.
if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class AnyJob:
    """A task with its problems, ready for a run of any kind."""

    settings: BaseSettings
    task: Task
    data: TaskData

    @property
    def planned(self) -> int:
        """The number of records in the finished run."""
        return len(self.data.problems)


@dataclass(frozen=True, slots=True)
class Job(AnyJob):
    """A task with its problems and their prompt tree.

    settings: the settings of the run.
    tree: the prompts as they are run, with chat format and system text.
    bare: the tree as the task made it.
    dropped: by problem id, how many nodes were left out to make the prompt fit.
    own: the requests to the model, if the task tokenizes its prompts itself and has done so.
    images: the hashes of a problem's images, by problem id; only problems with images.
    """

    settings: EvalSettings
    tree: Node
    bare: Node
    dropped: Mapping[str, int] = field(default_factory=dict)
    own: OwnRequests | None = None
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def planned(self) -> int:
        """The number of samples in the finished run."""
        return len(self.data.problems) * self.settings.num_samples

    @property
    def choices(self) -> dict[str, Problem]:
        """The problems whose texts are scored, by id; empty if samples are drawn."""
        scored = self.data.scored
        return {problem.id: problem for problem in self.data.problems if problem.choices or scored}

    def choice_prompts(self, tokenizer: Any) -> Sequence[ChoicePrompt]:
        """Return the tokens of the prompts with their choices."""
        if self.own is not None:
            return self.own.scored
        return choice_prompts(self.tree, self.choices, tokenizer)

    @property
    def drawing(self) -> SamplingParams | list[SamplingParams]:
        """The sampling parameters: one for all samples, or a list with one for each problem."""
        return self.settings.drawing if self.own is None else list(self.own.params)

    def annotate_record(self, record: dict[str, Any]) -> None:
        """Add a sample's images, and how many nodes its prompt was left without, to its record."""
        if images := self.images.get(record["problem_id"]):
            record["images"] = list(images)
        if dropped := self.dropped.get(record["problem_id"]):
            record["dropped"] = dropped


def load_task_data(task: Task, options: TaskOptions) -> TaskData:
    """Return a task's problems.

    Raises:
        DataError, InputError: the data or arguments cannot be used.
        TaskError: the task's own code fails.
    """
    check_arguments(task.name, options.extra, known_arguments(task))
    data = load_data(task, wrap_task_method(task.load, task.name)(options))
    if getattr(task, "limits_parts", False):
        return data
    chosen = select_if_needed(data.problems, options)
    return data if chosen is data.problems else replace(data, problems=tuple(chosen))


def load_job(settings: EvalSettings) -> Job:
    """Load a task with its problems and its prompt tree.

    Raises:
        DataError, InputError: the data or settings cannot be used.
        TaskError: the task's own code fails.
    """
    task = configure_task(get_task(settings.task), settings.options.extra)
    data = load_task_data(task, settings.options)
    if settings.score:
        check_ready(task)
    if is_multiple_choice(data):
        default = default_sampling(task.defaults, chat=settings.apply_chat_template)
        check_settings(task, settings.num_samples, settings.sampling, default)
    if settings.in_rounds or settings.votes:
        _check_votes(task, data)
    tree = wrap_task_method(task.tree, task.name)(data, settings.num_samples)
    prompts = prompts_of(tree)
    wanted = {(problem.id, settings.num_samples) for problem in data.problems}
    if {(prompt.id, prompt.samples) for prompt in prompts} != wanted:
        raise InputError(
            f"task {task.name!r} made a tree whose sampled nodes are not its "
            f"{len(data.problems)} problems with {settings.num_samples} samples each; "
            "mend its tree()"
        )
    images = {p.id: [i.sha256 for i in p.images] for p in data.problems if p.images}
    return Job(settings, task, data, _apply_chat_format(tree, settings), tree, images=images)


def _check_votes(task: Task, data: TaskData) -> None:
    """Raise InputError for a task whose samples do not vote."""
    why = ""
    if is_multiple_choice(data):
        why = "picks the likeliest choice and draws nothing"
    elif getattr(task, "executes_code", False):
        why = "asks for programs, of which no two have one answer"
    if why:
        raise InputError(
            f"task {task.name!r} {why}; leave out stop_when=, votes= and confidence= keep"
        )


def plan_job(job: Job, facts: "ModelInfo") -> Plan:
    """Return the plan of a job's prompts.

    Raises:
        CapacityError: a prompt is too long for the model, or does not fit in memory even alone.
        InputError: the model's tokenizer does not support the structure required of samples.
    """
    _check_structure(job, facts)
    try:
        return _plan_truncated(job, facts)
    except CapacityError as error:
        shorter: str | None = getattr(job.task, "shorter", None)
        if shorter is None:
            raise
        raise CapacityError(f"{error}; {job.task.name}: {shorter}") from error


def _check_structure(job: Job, facts: "ModelInfo") -> None:
    from treegen.prompts.grammars import grammar_of

    structure, spec = job.settings.sampling.structure, facts.spec
    grammar_of(structure, facts.tokenizer, spec.eos_token_ids, spec.vocab_size)


def first_prompt(job: Job, facts: "ModelInfo") -> str:
    """Return a job's first prompt as the model gets it, and its reference, as text for people."""
    from treegen.prompts.tokens import prompt_text

    prompt = prompts_of(truncate_job(job, facts.tokenizer, facts.spec).tree)[0]
    problem = next(p for p in job.data.problems if p.id == prompt.id)
    lines = [
        f"{job.task.name}: the prompt of {prompt.id}, from the next line on",
        prompt_text(prompt, facts.tokenizer),
        "(the prompt ends with the line before)",
    ]
    if problem.choices:
        lines.append(f"choices: {', '.join(map(repr, problem.candidates))}")
    return "\n".join([*lines, f"reference: {readable_reference(problem.answer)}"])


def _plan_truncated(job: Job, facts: "ModelInfo") -> Plan:
    from treegen.prompts.plan.requests import build_sample_requests
    from treegen.prompts.thinking import thinking_of

    thinking_of(job.settings.sampling, facts.tokenizer)  # raises for a budget without tags
    job = truncate_job(job, facts.tokenizer, facts.spec)
    if job.choices:
        return facts.plan(choice_requests(job.choice_prompts(facts.tokenizer), facts.spec))
    return facts.plan(build_sample_requests(job.tree, facts.tokenizer, job.drawing, facts.spec))


def truncate_job(job: Job, tokenizer: Any, spec: "ModelSpec") -> Job:
    """Return a job with its final prompts; too long ones are shortened as the task allows.

    Args:
        job: The job. A task that tokenizes its prompts itself makes its requests now.
        tokenizer: The model's tokenizer.
        spec: The model's specification, whose context length is the limit.
    """
    requests = getattr(job.task, "requests", None)
    if requests is not None:
        own = wrap_task_method(requests, job.task.name)(job.data, job.settings, tokenizer, spec)
        return replace(job, own=own, tree=own.tree)
    from treegen.prompts.plan.requests import check_length
    from treegen.prompts.tokens import tokenize

    def lengths(tree: Node) -> dict[str, int]:
        dressed = _apply_chat_format(tree, job.settings)
        if job.choices:
            return {p.id: p.longest for p in choice_prompts(dressed, job.choices, tokenizer)}
        return {p.id: len(p.tokens) for p in tokenize(dressed, tokenizer)}

    shortest = _apply_chat_format(barest(job.bare), job.settings)
    check_length(shortest, tokenizer, spec, drawn=not job.choices)
    room = 0 if job.choices else job.settings.sampling.max_tokens
    fitted = truncate_prompts(job.bare, lengths, spec.context_length - room)
    if not fitted.dropped:
        return job
    return replace(job, tree=_apply_chat_format(fitted.tree, job.settings), dropped=fitted.dropped)


def _apply_chat_format(tree: Node, settings: EvalSettings) -> Node:
    """Return a task's tree with the chat format and system text of the settings."""
    if settings.apply_chat_template:
        return as_chat(
            tree,
            settings.system_instruction,
            multiturn=settings.fewshot_as_multiturn,
            template={} if settings.reasoning == "auto" else {"reasoning": settings.reasoning},
        )
    if settings.system_instruction:
        return Node(f"{settings.system_instruction}\n\n", children=[tree], samples=0)
    return tree
