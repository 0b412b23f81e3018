"""Write a run in the schema of Every Eval Ever, version 0.3.0: an aggregate and its samples.

The folder has the layout of that project's datastore, data/BENCHMARK/DEVELOPER/MODEL/UUID.json and
UUID_samples.jsonl. See https://github.com/evaleval/every_eval_ever.
"""

import hashlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from treegen.common.files import file_name, replace_file
from treegen.common.formatting import replace_surrogates
from treegen.common.version import VERSION
from treegen.errors import InputError
from treegen.evals.statistics.metrics import MajorityRow, MetricRow
from treegen.evals.verdict import Verdict
from treegen.report.exchange.export import ExportedRun, export_references, plain_text
from treegen.report.view import ProblemView, Sample, settings_group

SCHEMA_VERSION: Final = "0.3.0"


def write(run: ExportedRun, folder: Path) -> list[Path]:
    """Write the aggregate and its samples and return both files.

    Raises:
        InputError: the samples are not scored.
        OSError: a file cannot be written.
    """
    if run.view.report is None or not run.view.filters:
        raise InputError(f"the run {run.view.path} has no scores; score the run first")
    name = str(uuid.UUID(bytes=run.digest("every-eval-ever")[:16], version=4))
    developer, _, model = run.model.rpartition("/")
    subfolder = Path(
        "data", file_name(run.view.task), file_name(developer or "unknown"), file_name(model)
    )
    (folder / subfolder).mkdir(parents=True, exist_ok=True)
    results = list(_iter_results(run))
    lines = [json.dumps(row, allow_nan=False) for row in _iter_rows(run, results)]
    text = "".join(f"{line}\n" for line in lines)
    samples = folder / subfolder / f"{name}_samples.jsonl"
    document = _build_aggregate(run, results)
    document["detailed_evaluation_results"] = {
        "format": "jsonl",
        "file_path": (subfolder / samples.name).as_posix(),
        "hash_algorithm": "sha256",
        "checksum": hashlib.sha256(text.encode()).hexdigest(),
        "total_rows": len(lines),
    }
    aggregate = folder / subfolder / f"{name}.json"
    for path, content in (
        (samples, text),
        (aggregate, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    ):
        with replace_file(path) as file:
            file.write(content.encode())
    return [aggregate, samples]


def _to_unix_time(time: str) -> str:
    """Return a time in ISO 8601 as seconds since 1970."""
    return str(datetime.fromisoformat(time).timestamp())


def _evaluation_id(run: ExportedRun) -> str:
    return f"{run.view.task}/{run.model.replace('/', '_')}/{_to_unix_time(run.view.info.created)}"


def _build_aggregate(run: ExportedRun, results: list[dict[str, Any]]) -> dict[str, Any]:
    info = run.view.info
    version = str(info.identity.get("treegen", VERSION))
    certificate = run.certificate
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _evaluation_id(run),
        "evaluation_timestamp": _to_unix_time(info.created),
        "retrieved_timestamp": _to_unix_time(info.created),
        "source_metadata": {
            "source_name": "treegen",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "treegen",
            "version": version,
            "additional_details": {
                "fingerprint": info.fingerprint,
                **({} if certificate is None else {"certificate_sha256": certificate.sha256}),
            },
        },
        "model_info": {
            "name": run.model,
            "id": run.model,
            "inference_engine": {"name": "treegen", "version": version},
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "unknown",
                **{key: str(value) for key, value in settings_group(info, "model").items()},
            },
        },
        "evaluation_results": results,
    }


def _iter_results(run: ExportedRun) -> Iterator[dict[str, Any]]:
    """Yield a result for each metric and each maj@k of each filter; of a group, for each task."""
    report = run.view.report
    assert report is not None
    is_group = len({row.task for row in report.metrics}) > 1
    scored = (p for p in run.view.problems if any(sample.verdicts for sample in p.samples))
    num_scored = Counter(map(_task_of, scored))
    unit = "clusters of problems" if any(p.group for p in run.view.problems) else "problems"
    named: list[tuple[str, MetricRow | MajorityRow, int | None]]
    named = [(row.metric, row, None) for row in report.metrics]
    named += [(f"maj@{vote.k}", vote, vote.k) for vote in report.majority]
    for metric, row, k in named:
        if row.value is None or not 0 <= row.value <= 1:
            continue
        task = row.task if is_group and isinstance(row, MetricRow) else run.view.task
        uncertainty: dict[str, Any] = {}
        if task in num_scored:
            uncertainty["num_samples"] = num_scored[task]
        elif task == run.view.task:
            uncertainty["num_samples"] = report.num_problems
        # Otherwise the row is of a group within the group; its problems are not known here.
        if row.stderr is not None:
            uncertainty["standard_error"] = {"value": row.stderr, "method": f"over {unit}"}
        if row.low is not None and row.high is not None:
            uncertainty["confidence_interval"] = {
                "lower": row.low,
                "upper": row.high,
                "confidence_level": 0.95,
                "method": f"adjusted t interval over {unit}",
            }
        yield {
            "evaluation_result_id": f"{task}:{row.filter}:{metric}"
            if is_group
            else f"{row.filter}:{metric}",
            "evaluation_name": task,
            "source_data": {
                "dataset_name": task,
                "source_type": "other",
                "additional_details": {"source": replace_surrogates(run.view.source) or "unknown"},
            },
            "evaluation_timestamp": _to_unix_time(run.view.info.created),
            "metric_config": {
                "evaluation_description": f"{metric}, answers read by {row.filter}",
                "metric_id": metric,
                "metric_name": metric,
                "metric_kind": re.sub(r"@\d+$", "", metric),
                "metric_unit": "proportion",
                "metric_parameters": {"filter": row.filter, **({} if k is None else {"k": k})},
                "lower_is_better": not getattr(row, "higher_is_better", True),
                "score_type": "continuous",
                "min_score": 0.0,
                "max_score": 1.0,
            },
            "score_details": {"score": row.value, "uncertainty": uncertainty},
            "generation_config": _describe_generation(run),
        }


def _task_of(problem: ProblemView) -> str:
    """Return the task of a problem of a group of lm-eval, whose ids are "TASK/NUMBER"."""
    return problem.id.rpartition("/")[0]


def _describe_generation(run: ExportedRun) -> dict[str, Any]:
    arguments = {
        name: run.sampling[name]
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if run.sampling.get(name) is not None
    }
    details = {"num_samples": str(run.view.num_samples), "seed": str(run.sampling.get("seed"))}
    return {"generation_args": arguments, "additional_details": details}


def _iter_rows(run: ExportedRun, results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample and filter, joined to the first metric of its task and filter."""
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for result in results:
        filter = result["metric_config"]["metric_parameters"]["filter"]
        first.setdefault((result["evaluation_name"], filter), result)
    for problem in run.view.problems:
        tasks = _task_of(problem), run.view.task
        for sample in problem.samples:
            for filter, verdict in (sample.verdicts or {}).items():
                joined = (first[task, filter] for task in tasks if (task, filter) in first)
                yield _build_row(run, problem, sample, filter, verdict, next(joined, None))


def _build_row(
    run: ExportedRun,
    problem: ProblemView,
    sample: Sample,
    filter: str,
    verdict: Verdict,
    result: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the row of a sample.

    Args:
        run: The run.
        problem: The problem of the sample.
        sample: The sample.
        filter: The filter that read the answer.
        verdict: The verdict by this filter.
        result: The result to which the row is joined; None if no result has this filter.
    """
    question, reference = replace_surrogates(problem.question), replace_surrogates(problem.answer)
    prompt = run.prompts.get(problem.id)
    thinking, answer = map(replace_surrogates, sample.parts)
    hashed = hashlib.sha256(f"{question}{reference}".encode()).hexdigest()
    attribution = {
        "turn_idx": 0,
        "source": "output.raw",
        "extracted_value": replace_surrogates(verdict.answer or ""),
        "extraction_method": filter,
        "is_terminal": True,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _evaluation_id(run),
        "model_id": run.model,
        "evaluation_name": result["evaluation_name"] if result else run.view.task,
        **({"evaluation_result_id": result["evaluation_result_id"]} if result else {}),
        "sample_id": replace_surrogates(problem.id),
        "sample_hash": hashed,
        "interaction_type": "single_turn",
        "input": {
            "raw": question,
            "formatted": None if prompt is None else replace_surrogates(plain_text(prompt)),
            "reference": export_references(problem),
            "choices": None,
        },
        "output": {"raw": [answer], "reasoning_trace": [thinking] if thinking else None},
        "messages": None,
        "answer_attribution": [attribution],
        "evaluation": {
            "score": float(verdict.correct) if verdict.credit is None else verdict.credit,
            "is_correct": verdict.correct,
        },
        "token_usage": {
            "input_tokens": problem.prompt_tokens,
            "output_tokens": sample.num_tokens,
            "total_tokens": problem.prompt_tokens + sample.num_tokens,
            "reasoning_tokens": sample.thinking.num_tokens if sample.thinking else None,
        },
        "metadata": {"sample_index": str(sample.index), "finish_reason": sample.finish_reason},
    }
