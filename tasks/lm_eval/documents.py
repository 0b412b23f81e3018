"""The documents and requests of a run, in the form in which lm-eval logs them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from treegen.evals.config.eval_settings import TASK, EvalSettings
from treegen.tasks.lm_eval.parts import TaskPart

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
    from treegen.tasks.lm_eval.requests import group_requests

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
