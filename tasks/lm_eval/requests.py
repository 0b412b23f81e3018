"""Converts lm-eval's requests to the same token ids as lm-eval's `hf` model."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from treegen.common.params import REQUEST_FIELDS, SamplingParams
from treegen.errors import InputError, ModelWarning, TaskError, arg
from treegen.evals.config.eval_settings import TASK, EvalSettings
from treegen.evals.multiple_choice import ChoicePrompt, OwnRequests, common_length
from treegen.integrations.lm_eval.conversion import (
    GenSettings,
    gen_settings,
    image_tokens,
    load_images,
    with_images,
)
from treegen.integrations.lm_eval.tokenizer import (
    HarnessTokenizer,
    Pair,
    split_into_windows,
    truncate_context,
    truncate_prompt,
)
from treegen.prompts.images.table import ImageTable
from treegen.prompts.reasoning import NAME, reasoning_arguments
from treegen.prompts.tree import Node
from treegen.tasks.lm_eval.load import quiet, use_default_seeds
from treegen.tasks.lm_eval.parts import TaskPart

if TYPE_CHECKING:
    from treegen.common.outputs import Completion
    from treegen.common.spec import ModelSpec

MAX_GEN_TOKS: Final = 256
"""Maximum tokens of an answer if a task sets none, as with lm-eval's `hf`."""
# Parameters that gen_kwargs may set; the seed comes from the run.
_OF_TASK: Final = {*REQUEST_FIELDS, "max_tokens", "stop"} - {"seed"}


def build_requests(
    parts: Sequence[TaskPart],
    ids: Sequence[str],
    settings: EvalSettings,
    tokenizer: Any,
    spec: "ModelSpec",
    table: ImageTable | None,
) -> OwnRequests:
    """Return the requests of some tasks.

    Args:
        parts: The tasks.
        ids: Ids of the problems, in their order.
        settings: Settings of the run.
        tokenizer: Tokenizer of the model.
        spec: Description of the model, which has the context length.
        table: The model's images; None if it takes none.

    Raises:
        InputError: The chat template is missing or rejects a prompt, or a prompt does not fit.
        CapacityError: A scored text is too long for the model.
        TaskError: A task has a kind of request that is not supported.
    """
    texts = _texts(settings, tokenizer)
    instances: dict[str, list[Instance]] = {}
    for part in parts:
        instances |= group_requests(part, settings, texts, has_images=table is not None)
    chosen = [instances[name] for name in ids]
    length = spec.context_length
    if parts[0].scored:
        pairs = _Pairs(texts, length)
        scored = tuple(
            _choices(name, pairs.of(doc_instances))
            for name, doc_instances in zip(ids, chosen, strict=True)
        )
        leaves = [Node(prompt.context.tolist(), id=prompt.id, samples=1) for prompt in scored]
        return OwnRequests(Node("", children=leaves, samples=0), scored=scored)
    settings_of: dict[str, tuple[GenSettings, SamplingParams]] = {}
    nodes, request_params = [], []
    until: dict[str, tuple[str, ...]] = {}
    for name, (request, *more) in zip(ids, chosen, strict=True):
        if more:
            raise TaskError(
                f"each problem of the lm-eval task {name} needs several texts, which is not "
                "supported; remove the task"
            )
        context, gen_kwargs, *extra = request.args
        if (key := repr(gen_kwargs)) not in settings_of:
            generation = gen_settings(
                gen_kwargs, max_gen_toks=MAX_GEN_TOKS, seed=0, eos=texts.eos, has_reasoning=False
            )
            settings_of[key] = generation, _params(generation.params, settings)
        generation, params = settings_of[key]
        if images := load_images(table, extra[0]) if extra else []:
            assert table is not None
            tokens = image_tokens(context, images, table, texts.encode_prompt)
        else:
            tokens = truncate_prompt(texts.encode_prompt(context), params.max_tokens, length)
        nodes.append(Node(tokens, id=name, samples=settings.num_samples))
        request_params.append(params)
        chose = settings.sources.get("stop", TASK) != TASK
        until[name] = params.stops if chose else generation.until

    def text(completion: "Completion") -> str:
        ended = isinstance(completion.stop, int)
        tokens = completion.tokens[:-1] if ended else completion.tokens
        return texts.answer(list(tokens), until[completion.prompt_id])

    return OwnRequests(Node("", children=nodes, samples=0), tuple(request_params), text=text)


def default_params(gen_kwargs: Mapping[str, Any]) -> SamplingParams:
    """Return a task's sampling parameters, before user and checkpoint override any."""
    return gen_settings(
        gen_kwargs, max_gen_toks=MAX_GEN_TOKS, seed=0, eos=None, has_reasoning=False
    ).params


def _params(task_params: SamplingParams, settings: EvalSettings) -> SamplingParams:
    """Return a request's own parameters with the overrides of the user and the checkpoint."""
    of_task = {
        name: getattr(task_params, name)
        for name in _OF_TASK
        if settings.sources.get(name, TASK) == TASK
    }
    return replace(settings.sampling_params, **of_task)


def _texts(settings: EvalSettings, tokenizer: Any) -> HarnessTokenizer:
    template: dict[str, Any] = {}
    if settings.apply_chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"{arg('apply_chat_template')} needs a tokenizer with a chat template; remove "
                "this option, or use another tokenizer"
            )
        template = reasoning_arguments({NAME: settings.reasoning}, tokenizer)
    return HarnessTokenizer(tokenizer, chat_template_args=template)


def group_requests(
    part: TaskPart, settings: EvalSettings, texts: HarnessTokenizer | None, *, has_images: bool
) -> dict[str, list[Instance]]:
    """Return a task's requests by problem, in their order.

    Args:
        part: The task.
        settings: Settings of the run.
        texts: Renders chats; None if the run has no chat template.
        has_images: Whether the model takes images.

    Raises:
        TaskError: The task has a kind of request that is not supported.
    """
    task = part.ready()
    if part.num_fewshot and _examples_hold_problems(task):
        warnings.warn(
            f"the lm-eval task {part.name} draws its {part.num_fewshot} few-shot examples from "
            "the evaluated problems, so scores may be too high; set fewshot_split in the YAML "
            "file of the task, or set num_fewshot=0",
            ModelWarning,
            stacklevel=2,
        )

    def chat(history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        assert texts is not None
        turns = list(map(with_images, history)) if has_images else list(history)
        return texts.chat(turns, add_generation_prompt)

    with quiet(), use_default_seeds():
        task.build_all_requests(
            samples=None if part.is_whole else set(part.indices),
            system_instruction=settings.system_instruction,
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=settings.fewshot_as_multiturn,
            chat_template=chat if settings.apply_chat_template else None,
        )
    instances: dict[str, list[Instance]] = defaultdict(list)
    names = part.ids  # lm-eval numbers documents in the order of the data
    for instance in task.instances:
        instances[names[instance.doc_id]].append(instance)
    for doc_instances in instances.values():
        doc_instances.sort(key=lambda instance: int(instance.idx))
        kinds = {instance.request_type for instance in doc_instances}
        if len(kinds) > 1 or ("generate_until" in kinds) == part.scored:
            listed = " and ".join(sorted(kinds))
            raise TaskError(f"{part.name} needs {listed}, which is not supported; remove the task")
    return instances


def _examples_hold_problems(task: Any) -> bool:
    """Return whether a problem may be one of its own few-shot examples.

    lm-eval removes the problem from the examples only if both come from the same `test_split`.
    """
    config, shots = task.config, getattr(task, "fewshot_cfg", None)
    if getattr(shots, "samples", None) is not None:
        return False
    named = getattr(shots, "split", None) or config.fewshot_split
    evaluated = config.test_split if task.has_test_docs() else config.validation_split
    if named is None:  # lm-eval's own rule
        named = (
            config.training_split
            if task.has_training_docs()
            else config.validation_split
            if task.has_validation_docs()
            else config.test_split
        )
        return bool(named == evaluated)
    return bool(named == evaluated and named != config.test_split)


class _Pairs(TemplateLM):  # type: ignore[misc]
    """Makes token pairs (context, continuation) of lm-eval's requests with lm-eval's own code."""

    def __init__(self, texts: HarnessTokenizer, max_length: int) -> None:
        super().__init__()
        self._texts, self._max_length = texts, max_length

    def of(self, instances: Sequence[Instance]) -> list[Pair]:
        """Return the pairs to score for the requests of one problem."""
        if instances[0].request_type == "loglikelihood":
            pairs: list[Pair] = self.loglikelihood(instances, disable_tqdm=True)
            return pairs
        return [
            pair
            for instance in instances
            for pair in split_into_windows(
                self.tok_encode(instance.args[0]), self.prefix_token_id, self._max_length
            )
        ]

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[Pair]:
        return [truncate_context(before, after, self._max_length) for _, before, after in requests]

    @property
    def eot_token_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self._texts.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """Id of the token before a text without context."""
        return self._texts.prefix_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text."""
        return self._texts.encode(string, add_special_tokens)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Raise NotImplementedError; `of` makes the windows of rolling requests."""
        raise NotImplementedError

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Raise NotImplementedError; texts are sampled by treegen."""
        raise NotImplementedError


def _choices(name: str, pairs: Sequence[Pair]) -> ChoicePrompt:
    sequences = tuple(np.array([*before, *after], dtype=np.int32) for before, after in pairs)
    starts = tuple(len(before) for before, _ in pairs)
    first = sequences[0][: starts[0]]
    shared = min(
        common_length(first, tokens[:start])
        for tokens, start in zip(sequences, starts, strict=True)
    )
    # The prompt in a record is the prefix that all texts share, which may be empty.
    return ChoicePrompt(name, first[: shared or len(first)], sequences, starts)


# A setting of a run -> the argument of lm-eval's generate_until that it overrides.
_ARGUMENTS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_gen_toks",
    "stop": "until",
}


def log_documents(parts: Sequence[TaskPart], settings: EvalSettings) -> dict[str, dict[str, Any]]:
    """Return the logged fields of each problem, by its id.

    The fields are `task` (the name of the task), `num_documents` (all documents of the task),
    `config` (the task's definition, as lm-eval dumps it), `doc_id`, `doc`, `target` and `arguments`
    (one list for each request). Without the model's tokenizer, chat prompts are not known; then
    `arguments` is missing.

    Args:
        parts: The tasks.
        settings: The settings of the run.
    """
    logged: dict[str, dict[str, Any]] = {}
    for part in parts:
        arguments = {} if settings.apply_chat_template else _list_arguments(part, settings)
        config = dict(part.task.dump_config())
        num_documents = len(part.task.eval_docs)
        for doc_id, (problem_id, doc) in zip(part.indices, part.docs.items(), strict=True):
            logged[problem_id] = {
                "task": part.name,
                "num_documents": num_documents,
                "config": config,
                "doc_id": doc_id,
                "doc": doc,
                "target": part.task.doc_to_target(doc),
                **({"arguments": arguments[problem_id]} if problem_id in arguments else {}),
            }
    return logged


def _list_arguments(part: TaskPart, settings: EvalSettings) -> dict[str, list[list[Any]]]:
    """Return the arguments of each problem's requests, with the run's sampling settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has shown them
        requests = group_requests(part, settings, None, has_images=False)
    logged: dict[str, list[list[Any]]] = {}
    for problem_id, of_problem in requests.items():
        logged[problem_id] = []
        for request in of_problem:
            arguments = list(request.args)
            if request.request_type == "generate_until":  # a third argument has the images
                arguments[1] = _override(arguments[1], settings)
            logged[problem_id].append(arguments)
    return logged


def _override(gen_kwargs: Mapping[str, Any], settings: EvalSettings) -> dict[str, Any]:
    """Return the arguments of a generation with the sampling settings that the user chose."""
    arguments = dict(gen_kwargs)
    for name, argument in _ARGUMENTS.items():
        if settings.sources.get(name, TASK) != TASK:
            value = getattr(settings.sampling, name)
            arguments[argument] = list(value) if isinstance(value, tuple) else value
            if name == "temperature":
                arguments["do_sample"] = bool(value)
    return arguments
