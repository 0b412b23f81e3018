"""Write a run as lm-evaluation-harness does: results_TIME.json and samples_TASK_TIME.jsonl.

A problem is a document and its samples are the responses of one request. `filtered_resps` has the
answer of each, and a metric of a document is the mean over its responses. lm-eval has no field for
verdicts on single responses, so they are in an additional field, `by_response`.
"""

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from treegen.common.files import path_component, replace_file
from treegen.common.formatting import replace_surrogates
from treegen.report.exchange.export import ExportedRun, plain_text
from treegen.report.view import ProblemView

BY_RESPONSE: Final = "by_response"


def write(run: ExportedRun, folder: Path) -> list[Path]:
    """Write the results and the samples and return both files.

    Raises:
        InputError: the name of the model or of the task cannot name a file.
        OSError: a file cannot be written.
    """
    name = run.model.replace("/", "__")
    where = folder / path_component(name, "the model of the run")
    where.mkdir(parents=True, exist_ok=True)
    stamp = run.view.info.created.split("+")[0].replace(":", "-")
    task = path_component(run.view.task.replace("/", "_"), "the task of the run")
    results = where / f"results_{stamp}.json"
    samples = where / f"samples_{task}_{stamp}.jsonl"
    rows = list(_documents(run))
    with replace_file(samples) as file:
        file.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
    with replace_file(results) as file:
        file.write(f"{json.dumps(_results(run, task, rows), indent=2)}\n".encode())
    return [results, samples]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _results(run: ExportedRun, task: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    view, info = run.view, run.view.info
    values: dict[str, Any] = {"name": task, "alias": task}
    better: dict[str, bool] = {}
    shots: int | None = None
    metrics = view.report.metrics if view.report else ()
    majority = view.report.majority if view.report else ()
    for row in metrics:
        values[f"{row.metric},{row.filter}"] = row.value
        values[f"{row.metric}_stderr,{row.filter}"] = "N/A" if row.stderr is None else row.stderr
        better[row.metric], shots = row.higher_is_better, row.num_fewshot
    for vote in majority:
        values[f"maj@{vote.k},{vote.filter}"] = vote.value
        values[f"maj@{vote.k}_stderr,{vote.filter}"] = "N/A" if vote.stderr is None else vote.stderr
        better[f"maj@{vote.k}"] = True
    sampling = run.sampling
    generation = {
        "until": list(sampling.get("stop") or ()),
        "max_gen_toks": sampling.get("max_tokens"),
        "temperature": sampling.get("temperature"),
        "do_sample": bool(sampling.get("temperature")),
    }
    version = run.version
    return {
        "results": {task: values},
        "group_subtasks": {task: []},
        "configs": {
            task: {
                "task": task,
                "output_type": "generate_until",
                "num_fewshot": shots,
                "repeats": view.num_samples,
                "generation_kwargs": generation,
                "metadata": {"version": version},
            }
        },
        "versions": {task: version},
        "n-shot": {task: shots},
        "higher_is_better": {task: better},
        "n-samples": {
            task: {
                "original": len(view.problems),
                "effective": sum(bool(p.samples) for p in view.problems),
            }
        },
        "config": {
            "model": "treegen",
            "model_args": {"pretrained": run.model},
            "gen_kwargs": {},
            "random_seed": sampling.get("seed"),
        },
        "date": datetime.fromisoformat(info.created).timestamp(),
        "task_hashes": {
            task: _hash("".join(r["doc_hash"] + r["prompt_hash"] + r["target_hash"] for r in rows))
        },
        "model_source": "treegen",
        "model_name": run.model,
        "model_name_sanitized": run.model.replace("/", "__"),
        "treegen": {"fingerprint": info.fingerprint, "versions": dict(info.versions)},
    }


def _documents(run: ExportedRun) -> Iterator[dict[str, Any]]:
    """Yield a line for each problem and filter, without metrics if nothing is scored."""
    for filter in run.view.filters or ("none",):
        for number, problem in enumerate(run.view.problems):
            if problem.samples:
                yield _document(run, number, problem, filter)


def _document(run: ExportedRun, number: int, problem: ProblemView, filter: str) -> dict[str, Any]:
    question, answer = replace_surrogates(problem.question), replace_surrogates(problem.answer)
    prompt = run.prompts.get(problem.id, problem.question)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    verdicts = [
        sample.verdicts[filter] if sample.verdicts and filter in sample.verdicts else None
        for sample in problem.samples
    ]
    right = [float(v.correct) for v in verdicts if v is not None]
    rows = run.view.report.metrics if run.view.report else ()
    # The first metric of a filter is the share of correct samples.
    metric = next((row.metric for row in rows if row.filter == filter), "exact_match")
    doc: dict[str, Any] = {
        "id": replace_surrogates(problem.id),
        "question": question,
        "answer": answer,
    }
    if problem.group:
        doc["group"] = replace_surrogates(problem.group)
    row: dict[str, Any] = {
        "doc_id": number,
        "doc": doc,
        "target": answer,
        "arguments": {"gen_args_0": {"arg_0": replace_surrogates(text), "arg_1": {}}},
        "resps": [[replace_surrogates(sample.text) for sample in problem.samples]],
        "filtered_resps": [
            [
                replace_surrogates(v.answer) if v and v.answer is not None else "[invalid]"
                for v in verdicts
            ]
        ],
        "filter": filter,
        "metrics": [metric] if right else [],
        "doc_hash": _hash(json.dumps(doc, indent=2)),
        "prompt_hash": _hash(replace_surrogates(plain_text(prompt))),
        "target_hash": _hash(answer),
    }
    if right:
        row[metric] = fmean(right)
    row[BY_RESPONSE] = [
        {
            "index": sample.index,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
            "answer": None
            if verdict is None or verdict.answer is None
            else replace_surrogates(verdict.answer),
            "correct": None if verdict is None else verdict.correct,
            "credit": None if verdict is None else verdict.credit,
        }
        for sample, verdict in zip(problem.samples, verdicts, strict=True)
    ]
    return row
