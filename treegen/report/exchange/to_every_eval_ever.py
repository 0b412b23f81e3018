"""Write a run in the schema of Every Eval Ever, version 0.3.0: an aggregate and its samples.

The folder has the layout of that project's datastore, data/BENCHMARK/DEVELOPER/MODEL/UUID.json and
UUID_samples.jsonl. See https://github.com/evaleval/every_eval_ever.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from treegen.common.files import file_name, replace_file
from treegen.common.formatting import replace_surrogates
from treegen.common.version import VERSION
from treegen.errors import InputError
from treegen.evals.statistics.metrics import MajorityRow, MetricRow
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
    path_in_repository = Path(
        "data", file_name(run.view.task), file_name(developer or "unknown"), file_name(model)
    )
    where = folder / path_in_repository
    where.mkdir(parents=True, exist_ok=True)
    results = list(_results(run))
    scored = {result["evaluation_result_id"]: result for result in results}
    lines = [json.dumps(row, allow_nan=False) for row in _rows(run, scored)]
    text = "".join(f"{line}\n" for line in lines)
    samples = where / f"{name}_samples.jsonl"
    document = _aggregate(run, results)
    document["detailed_evaluation_results"] = {
        "format": "jsonl",
        "file_path": (path_in_repository / samples.name).as_posix(),
        "hash_algorithm": "sha256",
        "checksum": hashlib.sha256(text.encode()).hexdigest(),
        "total_rows": len(lines),
    }
    aggregate = where / f"{name}.json"
    for path, content in (
        (samples, text),
        (aggregate, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    ):
        with replace_file(path) as file:
            file.write(content.encode())
    return [aggregate, samples]


def _seconds(time: str) -> str:
    return str(datetime.fromisoformat(time).timestamp())


def _id(run: ExportedRun) -> str:
    return f"{run.view.task}/{run.model.replace('/', '_')}/{_seconds(run.view.info.created)}"


def _aggregate(run: ExportedRun, results: list[dict[str, Any]]) -> dict[str, Any]:
    info = run.view.info
    version = str(info.identity.get("treegen", VERSION))
    certificate = run.certificate
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _id(run),
        "evaluation_timestamp": _seconds(info.created),
        "retrieved_timestamp": _seconds(info.created),
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


def _results(run: ExportedRun) -> Iterator[dict[str, Any]]:
    """Yield a result for each metric, and for each maj@k, of each filter."""
    report = run.view.report
    assert report is not None
    named: list[tuple[str, MetricRow | MajorityRow, int | None]]
    named = [(row.metric, row, None) for row in report.metrics]
    named += [(f"maj@{vote.k}", vote, vote.k) for vote in report.majority]
    for metric, row, k in named:
        if row.value is None or not 0 <= row.value <= 1:
            continue
        uncertainty: dict[str, Any] = {"num_samples": report.num_problems}
        if row.stderr is not None:
            uncertainty["standard_error"] = {"value": row.stderr, "method": "over problems"}
        if row.low is not None and row.high is not None:
            uncertainty["confidence_interval"] = {
                "lower": row.low,
                "upper": row.high,
                "confidence_level": 0.95,
                "method": "adjusted t interval over problems",
            }
        yield {
            "evaluation_result_id": f"{row.filter}:{metric}",
            "evaluation_name": run.view.task,
            "source_data": {
                "dataset_name": run.view.task,
                "source_type": "other",
                "additional_details": {"source": replace_surrogates(run.view.source) or "unknown"},
            },
            "evaluation_timestamp": _seconds(run.view.info.created),
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
            "generation_config": _generation(run),
        }


def _generation(run: ExportedRun) -> dict[str, Any]:
    arguments = {
        name: run.sampling[name]
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if run.sampling.get(name) is not None
    }
    details = {"num_samples": str(run.view.num_samples), "seed": str(run.sampling.get("seed"))}
    return {"generation_args": arguments, "additional_details": details}


def _rows(run: ExportedRun, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample and filter, joined to the filter's first metric."""
    first = {}
    for name in run.view.filters:
        keys = [key for key in results if key.startswith(f"{name}:")]
        first[name] = keys[0] if keys else None
    for problem in run.view.problems:
        for sample in problem.samples:
            for name, verdict in (sample.verdicts or {}).items():
                yield _row(run, problem, sample, name, verdict, first.get(name))


def _row(
    run: ExportedRun,
    problem: ProblemView,
    sample: Sample,
    name: str,
    verdict: Any,
    joined: str | None,
) -> dict[str, Any]:
    question, reference = replace_surrogates(problem.question), replace_surrogates(problem.answer)
    prompt = run.prompts.get(problem.id)
    thinking, answer = map(replace_surrogates, sample.parts)
    hashed = hashlib.sha256(f"{question}{reference}".encode()).hexdigest()
    attribution = {
        "turn_idx": 0,
        "source": "output.raw",
        "extracted_value": replace_surrogates(verdict.answer or ""),
        "extraction_method": name,
        "is_terminal": True,
    }
    credit = verdict.credit
    read = problem.prompt_tokens
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _id(run),
        "model_id": run.model,
        "evaluation_name": run.view.task,
        **({"evaluation_result_id": joined} if joined else {}),
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
            "score": float(verdict.correct) if credit is None else credit,
            "is_correct": verdict.correct,
        },
        "token_usage": {
            "input_tokens": read,
            "output_tokens": sample.num_tokens,
            "total_tokens": read + sample.num_tokens,
            "reasoning_tokens": sample.thinking.num_tokens if sample.thinking else None,
        },
        "metadata": {"sample_index": str(sample.index), "finish_reason": sample.finish_reason},
    }
