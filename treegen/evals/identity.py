"""The identity of a run: what it stores at its start and what a resumed run must match."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from treegen.common.params import PENALTIES
from treegen.common.version import VERSION
from treegen.errors import InputError, arg
from treegen.evals.config.base import drop_unset, explain_moved_data, find_moved_files
from treegen.evals.config.eval_settings import recall_choices, resolve_eval_settings
from treegen.evals.job import AnyJob, Job, load_job
from treegen.model.options import EngineOptions
from treegen.runs import RunDir, RunInfo, RunSettings, model_identity


def _any_of(*names: str) -> str:
    *others, last = (arg(f"{name}=") for name in names)
    return f"{', '.join(others)} or {last}"


# How a user sets a field of run.json, if the argument's name differs from the field's.
_ARGUMENTS: Final = {
    "task.name": arg("task="),
    "task.version": "",
    "data.problems": _any_of("data", "split", "limit", "ids"),
    "data.fewshot": _any_of("num_fewshot", "fewshot_file", "fewshot_data", "seed"),
    "model.fingerprint": _any_of("model", "adapter"),
    "model.chat_template": arg("chat_template="),
    **{f"draw.{name}": arg(f"{name}=") for name in PENALTIES},
    "sampling.min_tokens": "set by the task",
    "sampling.logit_bias": "set by the task",
    "treegen": "",
    "problem_ids": _any_of("limit", "ids"),
    "planned": "",
    "search.arguments": arg("arguments="),
    "search.source": "the file of the method has changed",
    **{f"budget.{name}": arg(f"budget={name}") for name in ("tokens", "calls", "seconds", "nodes")},
}

_COMPUTING: Final = ("device", "attention", "layers", "tensor_parallel_size", "threads")


def run_settings(
    job: AnyJob,
    *,
    dtype: str,
    fingerprint: str,
    device_type: str | None = None,
    quantization: str | None = None,
    computing: Mapping[str, str] | None = None,
) -> RunSettings:
    """Return the settings that a run stores and that a resumed run compares.

    Args:
        job: The job of the run.
        dtype: The name of the type that the model computes in.
        fingerprint: The hash of the model's weights.
        device_type: The kind of device, cpu or cuda, if workers of a cluster compute.
        quantization: As in `ModelInfo`.
        computing: As `computed_on` returns it; by default the values of this machine.
    """
    cache_dtype = job.settings.engine.kv_cache_dtype
    keys = None if cache_dtype == "auto" else cache_dtype
    return RunSettings(
        identity={
            **build_content_identity(job),
            "model": {
                **model_identity(fingerprint, dtype, quantization, keys),
                **_hash_template(job.settings.engine.chat_template),
            },
            "treegen": VERSION,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        arguments=_ARGUMENTS,
        computing=_computing(job.settings.engine, device_type) if computing is None else computing,
    )


def _hash_template(chat_template: str | None) -> dict[str, str]:
    """Return the hash of a chat template that replaces the tokenizer's own, as a field of run.json.

    Raises:
        InputError: the file of the template cannot be read.
    """
    if chat_template is None:
        return {}
    from treegen.model.tokenizer import read_chat_template  # imports torch

    return {"chat_template": _hash(read_chat_template(chat_template))}


def build_content_identity(job: AnyJob) -> dict[str, Any]:
    """Return the hashes of a job's task and problems that a run stores and runs are compared by."""
    problems = [problem.content for problem in job.data.problems]
    return {
        "task": {"name": job.task.name, "version": job.task.version},
        "data": {"problems": _hash(problems), "fewshot": _hash(job.data.examples)},
    }


def _computing(engine: EngineOptions, device_type: str | None) -> dict[str, str]:
    """Return what the last bits of logits depend on besides weights, dtype and versions."""
    import torch

    from treegen.model.config import resolve_device

    device = torch.device(device_type) if device_type else resolve_device(engine.device)
    ranks = {"tensor_parallel_size": str(engine.tensor_parallel_size)}
    if device.type == "cpu":
        # Workers of a cluster have threads of their own number.
        return {"device": "cpu", **ranks, "threads": str(torch.get_num_threads())}
    # A cluster's coordinator may run on a machine without a GPU.
    named = torch.cuda.is_available()
    compiled = not engine.eager if engine.compile is None else engine.compile
    return {
        **({"device": torch.cuda.get_device_name(device)} if named else {}),
        "attention": "invariant" if engine.reproducible else engine.impl,
        "layers": "compiled" if compiled else "as they are",
        **ranks,
    }


def computed_on(info: RunInfo) -> dict[str, str]:
    """Return what the last bits of a run's logits depended on when it was last resumed."""
    last = info.resumes[-1]["versions"] if info.resumes else info.versions
    return {name: last[name] for name in _COMPUTING if name in last}


def load_stored_job(choices: Mapping[str, Any], run: RunDir) -> Job:
    """Return the job of a stored run, for scoring.

    Args:
        choices: The user's choices, by the names of `OpenRunOptions` and of settings.
        run: The stored run.

    Raises:
        InputError: the problems or the task are not those of the run, or code would run that the
            user does not name.
        DataError: the problems cannot be read.
    """
    stored = find_moved_files(run.path, recall_choices(run))
    settings = {**stored, "score": True, "run_dir": run.path}
    with explain_moved_data(stored.get("data") if choices.get("data") is None else None):
        job = load_job(resolve_eval_settings(drop_unset(choices), settings))
    check_same_task(job, run.info.identity, str(run.path))
    check_same_data(job, run.info.identity, str(run.path))
    return job


def check_same_task(job: AnyJob, stored: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a job's task is that of a stored run.

    Args:
        job: The job that the user asks for.
        stored: The identity of the run.
        name: The run's name in the message.
    """
    if job.task.name != (was := _entry(stored, "task", "name")):
        raise InputError(
            f"{name} is a run of the task {was}, not of the task {job.task.name}; use another run"
        )


def check_same_data(job: Job, stored: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a job's problems are those that a stored run started with.

    Args:
        job: The job that the user asks for.
        stored: The identity of the run.
        name: The run's name in the message.
    """
    now = _hash([problem.content for problem in job.data.problems])
    if now != _entry(stored, "data", "problems"):
        raise InputError(
            f"the problems in {job.data.source} are not the problems of the run {name}; pass "
            f"the data of the run with {arg('data=')}"
        )


def _entry(stored: Mapping[str, Any], group: str, name: str) -> Any:
    """Return a stored setting; None in a file that lacks it."""
    section = stored.get(group)
    return section.get(name) if isinstance(section, Mapping) else None


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()[:32]
