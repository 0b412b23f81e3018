"""What makes a run the same run: what it stores when it begins, and a resume must agree on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import treegen
from treegen.errors import InputError
from treegen.evals.job import AnyJob, Job
from treegen.options import EngineOptions
from treegen.runs import RunSettings, model_identity


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
    kept_in = job.settings.engine.kv_cache_dtype
    keys = None if kept_in == "auto" else kept_in
    return RunSettings(
        identity={
            **content_of(job),
            "model": model_identity(fingerprint, dtype, quantization, keys),
            "treegen": treegen.__version__,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        flags=flags,
        computing=_computing(job.settings.engine, device_type),
    )


def content_of(job: AnyJob) -> dict[str, Any]:
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


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()[:32]
