"""What makes a run the same run: what it stores when it begins, and a resume must agree on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from treegen.common.params import PENALTIES
from treegen.common.version import VERSION
from treegen.errors import InputError
from treegen.evals.config.base import drop_unset, find_moved_files
from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
from treegen.evals.job import AnyJob, Job, load_job
from treegen.model.options import EngineOptions
from treegen.runs import RunDir, RunInfo, RunSettings, model_identity

# How a user sets a field of run.json, if not by an argument that has the field's name.
_ARGUMENTS: Final = {
    "task.name": "task=",
    "task.version": "",
    "data.problems": "data=, split=, limit= or ids=",
    "data.fewshot": "num_fewshot=, fewshot_file=, fewshot_data= or seed=",
    "model.fingerprint": "model= or adapter=",
    **{f"draw.{name}": f"{name}=" for name in PENALTIES},
    "sampling.min_tokens": "set by the task",
    "sampling.logit_bias": "set by the task",
    "treegen": "",
    "problem_ids": "limit= or ids=",
    "planned": "",
    "search.arguments": "arguments=",
    "search.source": "the file of the method has changed",
    **{f"budget.{name}": f"budget={name}" for name in ("tokens", "calls", "seconds", "nodes")},
}

_COMPUTING: Final = ("device", "attention", "layers", "tensor_parallel_size")


def run_settings(
    job: AnyJob,
    *,
    dtype: str,
    fingerprint: str,
    device_type: str | None = None,
    quantization: str | None = None,
    computing: Mapping[str, str] | None = None,
) -> RunSettings:
    """Return the settings that a run of a job stores and, when it is resumed, compares.

    Args:
        dtype: The name of the type that the model computes in.
        fingerprint: Of the weights.
        device_type: The kind of device, cpu or cuda, where workers of a cluster compute.
        quantization: Of `ModelInfo`.
        computing: As `computed_on` gives it; by default that of this machine.
    """
    kept_in = job.settings.engine.kv_cache_dtype
    keys = None if kept_in == "auto" else kept_in
    return RunSettings(
        identity={
            **build_content_identity(job),
            "model": model_identity(fingerprint, dtype, quantization, keys),
            "treegen": VERSION,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        arguments=_ARGUMENTS,
        computing=_computing(job.settings.engine, device_type) if computing is None else computing,
    )


def build_content_identity(job: AnyJob) -> dict[str, Any]:
    """Return what a run stores of its task and of its problems, by which runs are compared."""
    problems = [problem.content for problem in job.data.problems]
    return {
        "task": {"name": job.task.name, "version": job.task.version},
        "data": {"problems": _hash(problems), "fewshot": _hash(job.data.examples)},
    }


def _computing(engine: EngineOptions, device_type: str | None) -> dict[str, str]:
    """What the last bits of logits depend on beside weights, dtype and versions."""
    import torch

    from treegen.model.config import resolve_device

    device = torch.device(device_type) if device_type else resolve_device(engine.device)
    ranks = {"tensor_parallel_size": str(engine.tensor_parallel_size)}
    if device.type == "cpu":
        return {"device": "cpu", **ranks}
    # The machine of a cluster's coordinator may have no GPU.
    named = torch.cuda.is_available()
    compiled = not engine.eager if engine.compile is None else engine.compile
    return {
        **({"device": torch.cuda.get_device_name(device)} if named else {}),
        "attention": "invariant" if engine.reproducible else engine.impl,
        "layers": "compiled" if compiled else "as they are",
        **ranks,
    }


def computed_on(info: RunInfo) -> dict[str, str]:
    """Return what the last bits of a run's logits depended on when it last went on."""
    last = info.resumes[-1]["versions"] if info.resumes else info.versions
    return {name: last[name] for name in _COMPUTING if name in last}


def load_stored_job(asked: Mapping[str, Any], run: RunDir) -> Job:
    """Return the job of a stored run, to be scored.

    Args:
        asked: What the reader says of it, by the names of `OpenRunOptions` and of settings.

    Raises:
        InputError: the problems or the task are not those of the run, or code would run that the
        reader does not name.
    """
    stored = find_moved_files(run.path, stored_choices(run.info))
    job = load_job(
        resolve_eval_settings(drop_unset(asked), {**stored, "score": True, "kept": run.path})
    )
    check_same_task(job, run.info.identity, str(run.path))
    check_same_data(job, run.info.identity, str(run.path))
    return job


def check_same_task(job: AnyJob, stored: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a job's task is that of a stored run; see `check_same_data`."""
    if job.task.name != (was := stored["task"]["name"]):
        raise InputError(f"{name} is a run of {was}, not of {job.task.name}; name another run")


def check_same_data(job: Job, stored: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a job's problems are those that a run was begun with.

    Args:
        stored: The identity of the run.
        name: What to call it.
    """
    now = _hash([problem.content for problem in job.data.problems])
    if now != stored["data"]["problems"]:
        raise InputError(
            f"the problems in {job.data.source} are not those that {name} was sampled from; "
            "name the right data with data="
        )


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()[:32]
