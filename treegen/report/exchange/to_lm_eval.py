"""Write a run as lm-evaluation-harness does: results_TIME.json and samples_TASK_TIME.jsonl.

A problem is a document. For a run of `lm-eval:TASK`, documents, requests and log-likelihoods are
those that lm-eval logs; a group has a file of samples for each of its tasks. The samples of a
problem are the responses of one request. `filtered_resps` has the answer of each, and a metric of a
document is the mean over its responses. lm-eval has no field for verdicts on single responses, so
they are in an additional field, `by_response`; `problem_id`, `group`, `question` and `reference`
are treegen's, too.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from treegen.common.files import path_component, replace_file
from treegen.common.formatting import replace_surrogates
from treegen.evals.registry import LM_EVAL
from treegen.evals.verdict import MetricVerdict
from treegen.report.exchange.export import ExportedRun, export_references
from treegen.report.lm_eval_documents import TaskWithDocuments, dump_document
from treegen.report.view import ProblemView, Sample

BY_RESPONSE: Final = "by_response"
# Characters that a file's name cannot contain; lm-eval replaces the same ones.
_RESERVED: Final = re.compile(r"[\"<>:/|\\?*\[\]]+")
_INVALID: Final = "[invalid]"


def write(run: ExportedRun, folder: Path) -> list[Path]:
    """Write the results and the samples and return the files, the results first.

    Raises:
        InputError: the name of the model or of a task cannot name a file.
        OSError: a file cannot be written.
    """
    model = _RESERVED.sub("__", run.model)
    where = folder / path_component(model, "the model of the run")
    where.mkdir(parents=True, exist_ok=True)
    stamp = run.view.info.created.split("+")[0].replace(":", "-")
    results = where / f"results_{stamp}.json"
    rows: dict[str, list[dict[str, Any]]] = {}
    documents = _list_documents(run)
    for document in documents:
        rows.setdefault(document["task"], [])
    for document, row in _iter_rows(run, documents):
        rows[document["task"]].append(row)
    samples = {
        task: where / f"samples_{path_component(task, 'the task of the run')}_{stamp}.jsonl"
        for task in rows
    }
    with ExitStack() as stack:
        for task, path in samples.items():
            file = stack.enter_context(replace_file(path))
            file.writelines(f"{dump_document(row)}\n".encode() for row in rows[task])
    with replace_file(results) as file:
        file.write(f"{dump_document(_build_results(run, rows, documents), indent=2)}\n".encode())
    return [results, *samples.values()]


def _task_name(name: str) -> str:
    return _RESERVED.sub("_", name.removeprefix(LM_EVAL))


def _hash_text(text: str) -> str:
    return hashlib.sha256(replace_surrogates(text).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Tables:
    """The metrics of each task and group, and what the results file says about each."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The name, the number of documents, and each metric with its standard error."""
    better: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Whether higher values of a metric are better."""
    shots: dict[str, int | None] = field(default_factory=dict)
    """The number of few-shot examples."""
    versions: dict[str, Any] = field(default_factory=dict)


def _build_results(
    run: ExportedRun,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    documents: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the content of the results file.

    Args:
        run: The run.
        rows: The lines of samples of each task.
        documents: The documents, as `_list_documents` returns them.
    """
    sizes = {doc["task"]: doc["num_documents"] for doc in documents if "num_documents" in doc}
    tables = _collect_metrics(run, rows, are_tasks_of_lm_eval=bool(sizes))
    values = tables.values
    groups = {
        name: members for name, members in _list_groups(run).items() if name in values and members
    }
    return {
        "results": values,
        **({"groups": {name: values[name] for name in groups}} if groups else {}),
        "group_subtasks": groups,
        "configs": _describe_tasks(run, rows, documents, tables),
        "versions": tables.versions,
        "n-shot": tables.shots,
        "higher_is_better": tables.better,
        "n-samples": {
            name: {
                "original": sizes.get(name, len(run.view.problems)),
                "effective": values[name]["sample_len"],
            }
            for name in rows
        },
        **_describe_run(run),
        "task_hashes": {
            name: _hash_text(
                "".join(r["doc_hash"] + r["prompt_hash"] + r["target_hash"] for r in lines)
            )
            for name, lines in rows.items()
        },
    }


def _collect_metrics(
    run: ExportedRun,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    are_tasks_of_lm_eval: bool,
) -> _Tables:
    """Return the metrics of the run's report by lm-eval's names.

    Args:
        run: The run.
        rows: The lines of samples of each task.
        are_tasks_of_lm_eval: Whether lm-eval defines the tasks, so that a report may have several.
    """
    report, tables = run.view.report, _Tables()
    run_task = _task_name(run.view.task)
    for row in report.metrics if report else ():
        name = _task_name(row.task) if are_tasks_of_lm_eval else run_task  # others add a label
        values = tables.values.setdefault(name, {"name": name, "alias": name})
        values[f"{row.metric},{row.filter}"] = row.value
        values[f"{row.metric}_stderr,{row.filter}"] = "N/A" if row.stderr is None else row.stderr
        tables.better.setdefault(name, {})[row.metric] = row.higher_is_better
        tables.shots[name], tables.versions[name] = row.num_fewshot, _parse_version(row.version)
    for name in (run_task, *rows):
        tables.values.setdefault(name, {"name": name, "alias": name})
        tables.versions.setdefault(name, _parse_version(run.version))
        tables.shots.setdefault(name, None)
        tables.better.setdefault(name, {})
    for vote in report.majority if report else ():
        values = tables.values[run_task]
        values[f"maj@{vote.k},{vote.filter}"] = vote.value
        error = "N/A" if vote.stderr is None else vote.stderr
        values[f"maj@{vote.k}_stderr,{vote.filter}"] = error
        tables.better[run_task][f"maj@{vote.k}"] = True
    for name, lines in rows.items():
        tables.values[name]["sample_len"] = len({line["doc_id"] for line in lines})
    return tables


def _describe_tasks(
    run: ExportedRun,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    documents: Sequence[Mapping[str, Any]],
    tables: _Tables,
) -> dict[str, dict[str, Any]]:
    """Return the configuration of each task.

    Args:
        run: The run.
        rows: The lines of samples of each task.
        documents: The documents, as `_list_documents` returns them.
        tables: The metrics, as `_collect_metrics` returns them.
    """
    configs = {document["task"]: document.get("config", {}) for document in documents}
    is_generated = all(BY_RESPONSE in line for lines in rows.values() for line in lines)
    return {
        name: {
            "task": name,
            "output_type": "generate_until",
            **configs[name],
            "num_fewshot": tables.shots[name],
            "repeats": run.view.num_samples,
            **({"generation_kwargs": _describe_generation(run)} if is_generated else {}),
            "metadata": {
                **(configs[name].get("metadata") or {}),
                "version": tables.versions[name],
            },
        }
        for name in rows
    }


def _describe_run(run: ExportedRun) -> dict[str, Any]:
    """Return the fields of the results file about the model and the run as a whole."""
    info, system = run.view.info, run.system_instruction
    return {
        "config": {
            "model": "treegen",
            "model_args": {"pretrained": run.model},
            "gen_kwargs": {},
            "random_seed": run.sampling.get("seed"),
        },
        "date": datetime.fromisoformat(info.created).timestamp(),
        "model_source": "treegen",
        "model_name": run.model,
        "model_name_sanitized": _RESERVED.sub("__", run.model),
        "system_instruction": system,
        "system_instruction_sha": _hash_text(system) if system else None,
        "treegen": {
            "task": run.view.task,
            "fingerprint": info.fingerprint,
            "versions": dict(info.versions),
        },
    }


def _parse_version(version: str) -> object:
    """Return a version as the number that a task's YAML file has, if it is one."""
    try:
        return json.loads(version) if version else version
    except (ValueError, RecursionError):
        return version


def _list_groups(run: ExportedRun) -> dict[str, list[str]]:
    """Return the tasks of each group of a run of `lm-eval:TASK`."""
    task = None if run.view.job is None else run.view.job.task
    return task.log_groups() if isinstance(task, TaskWithDocuments) else {}


def _describe_generation(run: ExportedRun) -> dict[str, Any]:
    """Return the sampling settings by lm-eval's names."""
    sampling = run.sampling
    return {
        "until": list(sampling.get("stop") or ()),
        "max_gen_toks": sampling.get("max_tokens"),
        "temperature": sampling.get("temperature"),
        "do_sample": bool(sampling.get("temperature")),
        **{k: sampling[k] for k in ("top_p", "top_k", "min_p") if sampling.get(k) is not None},
    }


def _list_documents(run: ExportedRun) -> list[dict[str, Any]]:
    """Return what lm-eval logs of each problem that has a sample, besides responses and scores."""
    job = run.view.job
    logged: Mapping[str, Mapping[str, Any]] = {}
    if job is not None and isinstance(job.task, TaskWithDocuments):
        logged = job.task.log_documents(job.settings)
    documents = []
    for number, problem in enumerate(run.view.problems):
        if not problem.samples:
            continue
        document = {
            "task": _task_name(run.view.task),
            "doc_id": number,
            **(logged.get(problem.id) or _describe_problem(run, problem)),
            "problem": problem,
        }
        if "arguments" not in document:
            prompt = run.prompts.get(problem.id, problem.question)
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            document["arguments"] = [[replace_surrogates(text), _describe_generation(run)]]
        documents.append(document)
    return documents


def _describe_problem(run: ExportedRun, problem: ProblemView) -> dict[str, Any]:
    """Return the document and target of a problem of treegen's own tasks, and `own` fields."""
    references = export_references(problem)
    answer = references[0] if len(references) == 1 else references
    question = replace_surrogates(problem.question)
    fields = run.fields.get(problem.id) or {"question": question, "answer": answer}
    return {
        "doc": {"id": replace_surrogates(problem.id), **fields},
        "target": answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False),
        "own": {"question": question, "reference": replace_surrogates(problem.answer)},
    }


def _iter_rows(
    run: ExportedRun, documents: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each document and its line for each filter; no metrics if nothing is scored."""
    for filter in run.view.filters or ("none",):
        for document in documents:
            yield document, _build_row(run, document, filter)


def _build_row(run: ExportedRun, document: Mapping[str, Any], filter: str) -> dict[str, Any]:
    """Return a line of samples.

    Args:
        run: The run.
        document: The document, as `_list_documents` returns it.
        filter: The filter that read the answers.
    """
    problem: ProblemView = document["problem"]
    arguments = [
        [replace_surrogates(arg) if isinstance(arg, str) else arg for arg in request]
        for request in document["arguments"]
    ]
    target = str(document["target"])
    row: dict[str, Any] = {
        "doc_id": document["doc_id"],
        "doc": document["doc"],
        "target": target,
        "arguments": {
            f"gen_args_{i}": {f"arg_{j}": arg for j, arg in enumerate(request)}
            for i, request in enumerate(arguments)
        },
        "resps": [],
        "filtered_resps": [],
        "filter": filter,
        "metrics": [],
        "doc_hash": _hash_text(dump_document(document["doc"], indent=2)),
        "prompt_hash": _hash_text(str(arguments[0][0])),
        "target_hash": _hash_text(target),
    }
    likelihoods = _list_likelihoods(run, problem, arguments)
    values = _compute_metrics(run, problem.samples, filter)
    row["metrics"] = list(values)
    row |= values
    row["problem_id"] = replace_surrogates(problem.id)
    if problem.group:
        row["group"] = replace_surrogates(problem.group)
    row |= document.get("own", {})
    if likelihoods:
        row["resps"] = [[response] for response in likelihoods]
        row["filtered_resps"] = likelihoods
        return row
    verdicts = [sample.verdict(filter) for sample in problem.samples]
    answers = [
        replace_surrogates(v.answer) if v and v.answer is not None else _INVALID for v in verdicts
    ]
    row["resps"] = [[replace_surrogates(sample.text) for sample in problem.samples]]
    # lm-eval's filters reduce the repeats of a request to one response; treegen keeps them.
    row["filtered_resps"] = answers if run.view.num_samples == 1 else [answers]
    row[BY_RESPONSE] = _describe_responses(problem, filter)
    return row


def _describe_responses(problem: ProblemView, filter: str) -> list[dict[str, Any]]:
    """Return the verdict on each response of a problem.

    Args:
        problem: The problem.
        filter: The filter that read the answers.
    """
    verdicts = [sample.verdict(filter) for sample in problem.samples]
    return [
        {
            "index": sample.index,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
            "answer": None
            if verdict is None or verdict.answer is None
            else replace_surrogates(verdict.answer),
            "correct": None if verdict is None else verdict.correct,
            "credit": None if verdict is None else verdict.credit,
            **({"metrics": dict(verdict.measures)} if isinstance(verdict, MetricVerdict) else {}),
        }
        for sample, verdict in zip(problem.samples, verdicts, strict=True)
    ]


def _list_likelihoods(
    run: ExportedRun, problem: ProblemView, arguments: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return lm-eval's responses to the requests of a problem, as text; none if it is generated.

    A response is [logprob, is_greedy]; for a whole text without context, it is a logprob.

    Args:
        run: The run.
        problem: The problem.
        arguments: The arguments of its requests.
    """
    record = run.records[problem.id, problem.samples[0].index]
    logprobs, greedy = record.get("choice_logprobs"), record.get("choice_greedy")
    if not logprobs or any(
        isinstance(arg, Mapping) for request in arguments for arg in request[:2]
    ):
        return []
    if len(arguments[0]) == 1:
        return [str(sum(logprobs))]
    pairs = zip(logprobs, greedy or [False] * len(logprobs), strict=True)
    return [[str(logprob), str(is_greedy)] for logprob, is_greedy in pairs]


def _compute_metrics(run: ExportedRun, samples: Sequence[Sample], filter: str) -> dict[str, Any]:
    """Return the metrics of a problem; of several samples, the mean of each metric.

    A task of lm-eval has its own metrics; those that are not numbers have no mean. For other tasks,
    the metric is the share of correct samples, by the name of the filter's first metric.

    Args:
        run: The run.
        samples: The samples of the problem.
        filter: The filter that read the answers.
    """
    verdicts = [v for sample in samples if (v := sample.verdict(filter)) is not None]
    measures = [v.measures for v in verdicts if isinstance(v, MetricVerdict)]
    if len(measures) == 1:
        return dict(measures[0])
    if measures:
        means = {}
        for name in dict.fromkeys(name for of_sample in measures for name in of_sample):
            values = [of_sample[name] for of_sample in measures if name in of_sample]
            if all(isinstance(value, Real) for value in values):
                means[name] = fmean(map(float, values))
        return means
    rows = run.view.report.metrics if run.view.report else ()
    metric = next((row.metric for row in rows if row.filter == filter), "exact_match")
    return {metric: fmean(float(v.correct) for v in verdicts)} if verdicts else {}
