"""An evaluation before weights are loaded: its problems, its prompts and their plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from treegen.common.params import SamplingParams
from treegen.errors import CapacityError, InputError, arg
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import as_chat
from treegen.evals.config.base import BaseSettings
from treegen.evals.config.eval_settings import EvalSettings, default_sampling
from treegen.evals.multiple_choice import (
    ChoicePrompt,
    OwnRequests,
    check_settings,
    choice_prompts,
    choice_requests,
    is_multiple_choice,
)
from treegen.evals.problem import Problem, readable_reference
from treegen.evals.registry import get_task
from treegen.evals.selection import select_if_needed
from treegen.evals.task import Task, TaskData, TaskOptions
from treegen.evals.task_calls import check_data, wrap_task_method
from treegen.evals.truncation import drop_all_droppable, truncate_prompts
from treegen.evals.verdict import check_ready
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.tree import Node, prompts_of

# Importing torch takes seconds. Reading and checking the data does not need it.
if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM
    from treegen.model.model_info import ModelInfo
    from treegen.prompts.tokens import TokenPrompt


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
    """A task with its problems and their prompt tree."""

    settings: EvalSettings
    """The settings of the run."""
    tree: Node
    """The prompts as they are run, with chat format and system text."""
    bare: Node
    """The tree as the task made it."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By problem id, how many nodes were left out to make the prompt fit."""
    task_requests: OwnRequests | None = None
    """The requests of a task that tokenizes its prompts itself and has done so."""
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The hashes of a problem's images, by problem id; only problems with images."""

    @property
    def planned(self) -> int:
        """The number of samples in the finished run."""
        return len(self.data.problems) * self.settings.num_samples

    @property
    def choices(self) -> dict[str, Problem]:
        """The problems whose texts are scored, by id; empty if samples are drawn."""
        scored = self.data.scored
        return {problem.id: problem for problem in self.data.problems if problem.choices or scored}

    @property
    def sampling_params(self) -> SamplingParams | list[SamplingParams]:
        """The sampling parameters: one for all samples, or a list with one for each problem."""
        if self.task_requests is not None:
            return list(self.task_requests.params)
        return self.settings.sampling_params

    def annotate_record(self, record: dict[str, Any]) -> None:
        """Add a sample's images, and how many nodes its prompt was left without, to its record."""
        if images := self.images.get(record["problem_id"]):
            record["images"] = list(images)
        if dropped := self.dropped.get(record["problem_id"]):
            record["dropped"] = dropped


def load_task_data(
    task: Task, options: TaskOptions, load: Callable[[TaskOptions], TaskData] | None = None
) -> TaskData:
    """Return a task's problems.

    Args:
        task: The task.
        options: The user's choices about its data.
        load: Loads them. Default: the task's method `load`.

    Raises:
        DataError, InputError: the data or arguments cannot be used.
        TaskError: the task's own code fails.
    """
    check_arguments(task.name, options.extra, task.arguments)
    data = check_data(task, wrap_task_method(load or task.load, task.name)(options))
    if task.limits_parts:
        return data
    chosen = select_if_needed(data.problems, options)
    return data if chosen is data.problems else replace(data, problems=tuple(chosen))


def load_job(settings: EvalSettings) -> Job:
    """Load a task with its problems and its prompt tree.

    Raises:
        DataError, InputError: the data or settings cannot be used.
        TaskError: the task's own code fails.
    """
    task = get_task(settings.task)
    task.configure(settings.options.extra)
    data = load_task_data(task, settings.options)
    if settings.score:
        check_ready(task.answer_types)
    if is_multiple_choice(data):
        default = default_sampling(task.defaults, chat=settings.apply_chat_template)
        check_settings(task, settings.num_samples, settings.sampling, default)
    if settings.in_rounds or settings.votes:
        _check_votes(task, data)
    tree = wrap_task_method(task.tree, task.name)(data, settings.num_samples)
    prompts = prompts_of(tree)
    expected = {(problem.id, settings.num_samples) for problem in data.problems}
    if {(prompt.id, prompt.samples) for prompt in prompts} != expected:
        raise InputError(
            f"the tree of task {task.name!r} must have one node with {settings.num_samples} "
            f"samples for each of the {len(data.problems)} problems; fix the method tree() of "
            "the task"
        )
    images = {p.id: [i.sha256 for i in p.images] for p in data.problems if p.images}
    return Job(settings, task, data, _apply_chat_format(tree, settings), tree, images=images)


def _check_votes(task: Task, data: TaskData) -> None:
    """Raise InputError for a task whose samples do not vote."""
    why = ""
    if is_multiple_choice(data):
        why = "picks the most likely choice and draws no samples"
    elif task.executes_code:
        why = "asks for programs, and voting is not supported with programs"
    if why:
        raise InputError(
            f"task {task.name!r} {why}; remove {arg('stop_when=')}, {arg('votes=')} and the "
            f"keep value of {arg('confidence=')}"
        )


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose prompts fit a model, with the tokens of the prompts and their plan."""

    job: Job
    """The job with its final prompts; too long ones are shortened as the task allows."""
    model_info: "ModelInfo"
    """The properties of the model."""
    plan: Plan
    """The plan of the requests; it has the tokens of every prompt."""
    choice_prompts: Sequence[ChoicePrompt] = ()
    """The scored texts of each problem; empty if samples are drawn."""

    def plan_for(self, llm: "BaseLLM", scored: Sequence[ChoicePrompt] | None = None) -> Plan:
        """Return the plan for the loaded model, which may share or store differently.

        The model's table of images gets the images of the prompts.

        Args:
            llm: The loaded model.
            scored: The choice prompts that are left to score; None for all.
        """
        job_images, llm_images = self.model_info.images, llm.images
        if job_images is not None and llm_images is not None and job_images is not llm_images:
            llm_images.import_images(
                job_images.images_in(request.tokens for request in self.plan.requests)
            )
        if scored is None or len(scored) == len(self.choice_prompts):
            return llm.adopt_plan(self.plan, self.model_info)
        scored_plan = self.model_info.plan_unchecked(choice_requests(scored, self.model_info.spec))
        return llm.adopt_plan(scored_plan, self.model_info)

    def pair_requests(self) -> dict[str, tuple[Request, SamplingParams]]:
        """Return the request and the parameters of each problem, by id; none of scored choices."""
        sampling, requests = self.job.sampling_params, self.plan.requests
        if self.job.choices:
            return {}
        params = sampling if isinstance(sampling, list) else [sampling] * len(requests)
        return {request.id: (request, one) for request, one in zip(requests, params, strict=True)}


def prepare_job(job: Job, model_info: "ModelInfo") -> PreparedJob:
    """Fit a job's prompts to a model, tokenize them and plan them, each once.

    Raises:
        CapacityError: a prompt is too long for the model, or does not fit in memory even alone.
        InputError: the model's tokenizer does not support the structure required of samples.
    """
    from treegen.prompts.grammars import grammar_of
    from treegen.prompts.thinking import thinking_of

    sampling, spec, tokenizer = job.settings.sampling, model_info.spec, model_info.tokenizer
    grammar_of(sampling.structure, tokenizer, spec.eos_token_ids, spec.vocab_size)
    try:
        thinking_of(sampling, tokenizer)  # raises for a budget without tags
        fitted = fit_job(job, model_info)
        return PreparedJob(
            fitted.job,
            model_info,
            model_info.plan(fitted.requests(model_info)),
            fitted.choice_prompts,
        )
    except CapacityError as error:
        if job.task.shorter is None:
            raise
        marked = error.message.marked
        raise CapacityError(f"{marked}; {job.task.name}: {job.task.shorter}") from error


@dataclass(frozen=True, slots=True)
class FittedJob:
    """A job with its final prompts and their tokens; it has one kind of prompts."""

    job: Job
    prompts: "Sequence[TokenPrompt]" = ()
    """The prompts that samples are drawn after."""
    choice_prompts: Sequence[ChoicePrompt] = ()
    """The scored texts of each problem."""

    def requests(self, model_info: "ModelInfo") -> list[Request]:
        """Return the requests of the prompts to a model."""
        from treegen.prompts.plan.requests import requests_of_prompts

        if self.job.choices:
            return choice_requests(self.choice_prompts, model_info.spec)
        return requests_of_prompts(
            self.prompts,
            model_info.tokenizer,
            self.job.sampling_params,
            model_info.spec,
            model_info.images,
        )


def fit_job(job: Job, model_info: "ModelInfo") -> FittedJob:
    """Return a job with its final prompts; too long ones are shortened as the task allows.

    Args:
        job: The job. A task that tokenizes its prompts itself makes its requests now.
        model_info: The properties of the model, whose context length is the limit.
    """
    from treegen.prompts.plan.requests import check_length
    from treegen.prompts.tokens import tokenize

    tokenizer, spec, images = model_info.tokenizer, model_info.spec, model_info.images
    make_requests = wrap_task_method(job.task.requests, job.task.name)
    task_requests: OwnRequests | None = make_requests(
        job.data, job.settings, tokenizer, spec, images
    )
    if task_requests is not None:
        job = replace(job, task_requests=task_requests, tree=task_requests.tree)
        if job.choices:
            return FittedJob(job, choice_prompts=task_requests.scored)
        check_length(task_requests.tree, tokenizer, spec, images)
        return FittedJob(job, prompts=tokenize(task_requests.tree, tokenizer, images))

    choices = job.choices
    prompts: dict[str, Any] = {}

    def measure(tree: Node) -> dict[str, int]:
        """Tokenize the prompts of a tree, and return their lengths by id."""
        tree = _apply_chat_format(tree, job.settings)
        if choices:
            scored = choice_prompts(tree, choices, tokenizer, images)
            prompts.update((prompt.id, prompt) for prompt in scored)
            return {prompt.id: prompt.longest for prompt in scored}
        tokenized = tokenize(tree, tokenizer, images)
        prompts.update((prompt.id, prompt) for prompt in tokenized)
        return {prompt.id: len(prompt.tokens) for prompt in tokenized}

    shortest = _apply_chat_format(drop_all_droppable(job.bare), job.settings)
    check_length(shortest, tokenizer, spec, images, generates=not choices)
    room = 0 if choices else job.settings.sampling.max_tokens
    tree, dropped = truncate_prompts(job.bare, measure, spec.context_length - room)
    if dropped:
        job = replace(job, tree=_apply_chat_format(tree, job.settings), dropped=dropped)
    in_order = [prompts[prompt.id] for prompt in prompts_of(job.tree)]
    return FittedJob(job, choice_prompts=in_order) if choices else FittedJob(job, prompts=in_order)


def first_prompt(job: Job, model_info: "ModelInfo") -> str:
    """Return the first prompt of a fitted job, and its reference, as text for people.

    Args:
        job: The job with its final prompts.
        model_info: The properties of the model.
    """
    from treegen.prompts.tokens import prompt_text

    prompt = prompts_of(job.tree)[0]
    problem = next(p for p in job.data.problems if p.id == prompt.id)
    lines = [
        f"{job.task.name}: the prompt of {prompt.id}, from the next line on",
        prompt_text(prompt, model_info.tokenizer, model_info.images),
        "(the prompt ends with the line before)",
    ]
    if problem.choices:
        lines.append(f"choices: {', '.join(map(repr, problem.candidates))}")
    return "\n".join([*lines, f"reference: {readable_reference(problem.answer)}"])


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
