"""One evaluation before weights are loaded: prompts, plan, and what a resume must agree on."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treegen
from treegen.closing import Closing
from treegen.errors import CapacityError, InputError, ModelError
from treegen.evals.answers import check_ready
from treegen.evals.arguments import check_arguments, configured, known_arguments
from treegen.evals.calls import asked, load_data
from treegen.evals.chat import as_chat
from treegen.evals.choices import by_likelihood, check_settings, choice_prompts, choice_requests
from treegen.evals.fitting import fit
from treegen.evals.given import RunChoices
from treegen.evals.problem import Problem
from treegen.evals.registry import get_task
from treegen.evals.selection import select_if_needed
from treegen.evals.settings import EvalSettings, default_sampling
from treegen.evals.task import Task, TaskData, TaskOptions
from treegen.options import EngineOptions
from treegen.plan.plan import Plan
from treegen.prompts.tree import Node, prompts_of
from treegen.runs import RunSettings

# Importing torch takes seconds. Reading and checking the data does not need it.
if TYPE_CHECKING:
    from treegen.cluster.places import Places
    from treegen.llm import LLM
    from treegen.plan.plan import Request
    from treegen.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AnyJob:
    """One task made ready with its problems, for a run of any kind."""

    settings: RunChoices
    task: Task
    data: TaskData

    @property
    def planned(self) -> int:
        """Records of the finished run."""
        return len(self.data.problems)


@dataclass(frozen=True, slots=True)
class Job(AnyJob):
    """One task with its problems and their prompt tree.

    settings: what was asked for.
    tree: the prompts as they are run, with chat format and system text.
    bare: the tree as the task made it.
    dropped: by problem id, how many nodes were left out to make the prompt fit.
    """

    settings: EvalSettings
    tree: Node
    bare: Node
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def planned(self) -> int:
        """Samples of the finished run."""
        return len(self.data.problems) * self.settings.num_samples

    @property
    def choices(self) -> dict[str, Problem]:
        """The problems that have choices, by id; empty where samples are drawn."""
        return {problem.id: problem for problem in self.data.problems if problem.choices}

    def mark(self, record: dict[str, Any]) -> None:
        """Note in a sample's record how many nodes were left out of its prompt."""
        if dropped := self.dropped.get(record["problem_id"]):
            record["dropped"] = dropped


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's shape, tokenizer and cache size, found without its weights.

    engine: the options that the rest follows from.
    spec: the model's shape.
    tokenizer: its tokenizer.
    dtype: the name of the type to compute in, such as "bfloat16".
    device_type: "cpu" or "cuda".
    max_rows: most rows to decode at once.
    page_size: tokens of a cache page.
    memory: bytes of the cache. num_pages: its pages. Both are None if only the loaded model can
    tell, as with a GPU's free memory.
    num_states: its slots for recurrent states; None likewise, and for a model without any.
    align: attention parts begin at multiples of so many positions.
    quantization: how its matrices are computed, such as "fp8"; None for as dtype says.
    """

    engine: EngineOptions
    spec: "ModelSpec"
    tokenizer: Any
    dtype: str
    device_type: str
    max_rows: int
    page_size: int
    memory: int | None
    num_pages: int | None
    num_states: int | None
    align: int = 1
    quantization: str | None = None

    def plan(self, requests: "Sequence[Request]") -> Plan:
        """Return the plan of requests; raise CacheFullError for one that can never fit."""
        from treegen.plan.requests import plan_requests

        plan = plan_requests(
            requests,
            self.spec,
            device_type=self.device_type,
            sharing=self.engine.sharing,
            max_rows=self.max_rows,
            align=self.align,
        )
        if self.num_pages is not None:
            plan.check_fits(self.num_pages, self.page_size, self.num_states)
        return plan


def load_task_data(task: Task, options: TaskOptions) -> TaskData:
    """Return a task's problems.

    Raises:
        DataError, InputError: the data or arguments cannot be used.
        TaskError: the task's own code fails.
    """
    check_arguments(task.name, options.extra, known_arguments(task))
    data = load_data(task, asked(task.load, task.name)(options))
    chosen = select_if_needed(data.problems, options)
    return data if chosen is data.problems else replace(data, problems=tuple(chosen))


def load_job(settings: EvalSettings) -> Job:
    """Return a task with its problems and tree.

    Raises:
        DataError, InputError: the data or settings cannot be used.
        TaskError: the task's own code fails.
    """
    task = configured(get_task(settings.task), settings.options.extra)
    data = load_task_data(task, settings.options)
    if settings.score:
        check_ready(task)
    if by_likelihood(data):
        default = default_sampling(task.defaults, chat=settings.apply_chat_template)
        check_settings(task, settings.num_samples, settings.sampling, default)
    if settings.in_rounds or settings.votes:
        _check_votes(task, data)
    tree = asked(task.tree, task.name)(data, settings.num_samples)
    prompts = prompts_of(tree)
    wanted = {(problem.id, settings.num_samples) for problem in data.problems}
    if {(prompt.id, prompt.samples) for prompt in prompts} != wanted:
        raise InputError(
            f"task {task.name!r} made a tree whose sampled nodes are not its "
            f"{len(data.problems)} problems with {settings.num_samples} samples each"
        )
    return Job(settings, task, data, _dressed(tree, settings), tree)


def _check_votes(task: Task, data: TaskData) -> None:
    """Raise InputError for a task whose samples do not vote."""
    why = ""
    if by_likelihood(data):
        why = "picks the likeliest choice and draws nothing"
    elif getattr(task, "executes_code", False):
        why = "asks for programs, of which no two have one answer"
    if why:
        raise InputError(
            f"task {task.name!r} {why}; leave out --stop-when, --votes and --confidence keep"
        )


def look_at_model(engine: EngineOptions, places: "Places | None" = None) -> ModelFacts:
    """Return the facts about a model that its configuration and tokenizer tell.

    places: of workers that do the work, on devices that this machine need not have.
    """
    import torch

    from treegen.engine.draft_model import look_at_draft
    from treegen.engine.speculation import check_speculation
    from treegen.model import memory
    from treegen.model.config import load_spec, read_config, resolve_device, resolve_dtype
    from treegen.model.files import load_tokenizer, locate
    from treegen.model.load import stays_fp8
    from treegen.model.quantized import quantisation_of
    from treegen.model.reproducible import ALIGN, check_dtype, check_layers

    source: dict[str, Any] = {
        "revision": engine.revision,
        "trust_remote_code": engine.trust_remote_code,
    }
    device = torch.device(places.device) if places else resolve_device(engine.device)
    directory = locate(engine.model, engine.revision, weights=False)
    config = read_config(engine.model, directory, **source)
    dtype = resolve_dtype(engine.dtype, config, device)
    asked = engine.loading()["quantization"]
    in_fp8 = asked == "fp8" or stays_fp8(quantisation_of(config), asked, device)
    ranks = engine.tensor_parallel_size
    spec = load_spec(
        engine.model, dtype, device="cpu",  # dtype is settled
        kv_cache_dtype=engine.kv_cache_dtype, ranks=ranks, **source,
    )  # fmt: skip
    check_speculation(engine, spec)
    if engine.reproducible:
        check_dtype(dtype, device)
        check_layers(spec, device)
    page_size, max_rows, _ = engine.sizes(device.type)
    size = engine.cache_bytes
    if size is None and device.type == "cpu":
        size = memory.default_bytes(device)
    tokenizer = load_tokenizer(engine.model, **source)
    if engine.draft_model is not None:
        beside = look_at_draft(engine, tokenizer, dtype)
        size = None if size is None else memory.less_beside(size, spec, beside.kv_bytes_per_token)
    room = None if size is None else memory.cache_size(size, spec, page_size, max_rows)
    return ModelFacts(
        engine=engine,
        spec=spec,
        tokenizer=tokenizer,
        dtype=str(dtype).removeprefix("torch."),
        device_type=device.type,
        max_rows=max_rows,
        page_size=page_size,
        memory=size,
        num_pages=None if room is None else room.pages,
        num_states=None if room is None else room.states,
        align=ALIGN if engine.reproducible and device.type == "cuda" else 1,
        quantization="fp8" if in_fp8 else None,
    )


def check_machine(engine: EngineOptions, places: "Places | None" = None) -> None:
    """Raise InputError or CapacityError for what this machine cannot do, whatever the model.

    Workers check their own machines.
    """
    from treegen import llm
    from treegen.model.config import resolve_device

    if places is None:
        llm.check_machine(engine, resolve_device(engine.device))


def plan_job(job: Job, facts: ModelFacts) -> Plan:
    """Return the plan of a job's prompts.

    Raises:
        CapacityError: a prompt is too long for the model, or does not fit in memory even alone.
    """
    try:
        return _planned(job, facts)
    except CapacityError as error:
        shorter: str | None = getattr(job.task, "shorter", None)
        if shorter is None:
            raise
        raise CapacityError(f"{error}; {job.task.name}: {shorter}") from error


def first_prompt(job: Job, facts: ModelFacts) -> str:
    """Return a text for people: a job's first prompt as the model gets it, and its reference."""
    from treegen.prompts.tokens import prompt_text

    prompt = prompts_of(fit_job(job, facts.tokenizer, facts.spec).tree)[0]
    problem = next(each for each in job.data.problems if each.id == prompt.id)
    lines = [
        f"{job.task.name}: the prompt of {prompt.id}, from the next line on",
        prompt_text(prompt, facts.tokenizer),
        "(the prompt ends with the line before)",
    ]
    if problem.choices:
        lines.append(f"choices: {', '.join(map(repr, problem.candidates))}")
    return "\n".join([*lines, f"reference: {problem.answer}"])


def _planned(job: Job, facts: ModelFacts) -> Plan:
    from treegen.plan.requests import sample_requests
    from treegen.prompts.thinking import thinking_of

    thinking_of(job.settings.sampling, facts.tokenizer)  # refuses a budget without tags
    job = fit_job(job, facts.tokenizer, facts.spec)
    if job.choices:
        prompts = choice_prompts(job.tree, job.choices, facts.tokenizer)
        return facts.plan(choice_requests(prompts, facts.spec))
    sampling = job.settings.sampling
    return facts.plan(sample_requests(job.tree, facts.tokenizer, sampling, facts.spec))


def fit_job(job: Job, tokenizer: Any, spec: "ModelSpec") -> Job:
    """Return a job whose too long prompts are shortened, as far as its task allows."""
    from treegen.prompts.tokens import tokenize

    def lengths(tree: Node) -> dict[str, int]:
        dressed = _dressed(tree, job.settings)
        if job.choices:
            return {p.id: p.longest for p in choice_prompts(dressed, job.choices, tokenizer)}
        return {p.id: len(p.tokens) for p in tokenize(dressed, tokenizer)}

    room = 0 if job.choices else job.settings.sampling.max_tokens
    fitted = fit(job.bare, lengths, spec.context_length - room)
    if not fitted.dropped:
        return job
    return replace(job, tree=_dressed(fitted.tree, job.settings), dropped=fitted.dropped)


def weights_fingerprint(engine: EngineOptions) -> str:
    """Return a hash that stands for a model's weights; raise ModelError if there are none."""
    from treegen.model.files import check_weights, fingerprint, locate

    directory: Path = locate(engine.model, engine.revision, weights=True)
    check_weights(directory)
    return fingerprint(directory)


def run_settings(
    job: AnyJob,
    *,
    dtype: str,
    fingerprint: str,
    flags: Mapping[str, str],
    device_type: str | None = None,
    quantization: str | None = None,
) -> RunSettings:
    """Return the settings that a run of a job stores and, when it is resumed, compares.

    dtype: the name of the type that the model computes in.
    fingerprint: of the weights.
    flags: how the user sets each field, for messages.
    device_type: the kind of device, cpu or cuda, where workers of a cluster compute.
    quantization: of `ModelFacts`.
    """
    problems = [problem.content for problem in job.data.problems]
    kinds = {"quantization": quantization, "kv_cache_dtype": job.settings.engine.kv_cache_dtype}
    quantized = {name: kind for name, kind in kinds.items() if kind not in (None, "auto")}
    return RunSettings(
        identity={
            "task": {"name": job.task.name, "version": job.task.version},
            "data": {"problems": _hash(problems), "fewshot": _hash(job.data.examples)},
            "model": {"fingerprint": fingerprint, "dtype": dtype, **quantized},
            "treegen": treegen.__version__,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        flags=flags,
        computing=_computing(job.settings.engine, device_type),
    )


def _computing(engine: EngineOptions, device_type: str | None) -> dict[str, str]:
    """What the last bits of logits depend on beside weights, dtype and versions."""
    import torch

    from treegen.model.config import resolve_device

    device = torch.device(device_type) if device_type else resolve_device(engine.device)
    if device.type == "cpu":
        return {"device": "cpu"}
    # The machine of a cluster's coordinator may have no GPU.
    named = torch.cuda.is_available()
    compiled = not engine.eager if engine.compile is None else engine.compile
    return {
        **({"device": torch.cuda.get_device_name(device)} if named else {}),
        "attention": "invariant" if engine.reproducible else engine.impl,
        "layers": "compiled" if compiled else "as they are",
    }


def check_same_data(job: Job, stored: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a job's problems are those that a run was begun with.

    stored: the identity of the run. name: what to call it.
    """
    now = _hash([problem.content for problem in job.data.problems])
    if now != stored["data"]["problems"]:
        raise InputError(
            f"the problems in {job.data.source} are not those that {name} was sampled from; "
            "name the right data with --data"
        )


def load_llm(
    engine: EngineOptions,
    fingerprint: str,
    places: "Places | None" = None,
    before: Sequence[Callable[[], object]] = (),
) -> "LLM":
    """Load a model.

    places: of workers. What is returned is then a Cluster, to be closed.
    before: what each worker calls before it loads the model.

    Raises:
        ModelError: its files changed since `weights_fingerprint`, or it cannot be used.
    """
    from treegen.llm import LLM

    llm: LLM
    if places is None:
        llm = LLM(**asdict(engine))
    else:
        from treegen.cluster.cluster import Cluster

        llm = Cluster.at(places, engine, before)
    if llm.fingerprint != fingerprint:
        if isinstance(llm, Closing):
            llm.close()
        raise ModelError(f"the files of {engine.model} changed while they were read; start again")
    return llm


def _dressed(tree: Node, settings: EvalSettings) -> Node:
    """Return a task's tree with the chat format and system text that settings ask for."""
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


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()[:32]
