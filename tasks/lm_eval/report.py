"""Scores responses with lm-eval's filters and metrics, and adds intervals, votes and groups."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean

from treegen.evals.statistics.estimators import standard_error
from treegen.evals.statistics.metrics import (
    MetricRow,
    Report,
    ReportOptions,
    mean_row,
    summarize,
)
from treegen.evals.verdict import MetricVerdict, SampleScore
from treegen.tasks.lm_eval.parts import TaskPart

# Results of filters that find nothing.
_NOTHING: Final = ("[invalid]", "")


def responses_of(part: TaskPart, record: Mapping[str, Any], text: str) -> list[Any]:
    """Return lm-eval's responses to a document's requests, from a stored sample.

    Args:
        part: The task.
        record: The stored sample.
        text: Text of the sample.
    """
    if not part.scored:
        return [text]
    logprobs = record["choice_logprobs"]
    if part.task.OUTPUT_TYPE == "loglikelihood_rolling":
        return [math.fsum(logprobs)]
    return list(zip(logprobs, record["choice_greedy"], strict=True))


def score_responses(
    part: TaskPart, doc: Any, responses: Sequence[Any], text: str
) -> dict[str, MetricVerdict]:
    """Return the verdicts on one sample by filter.

    Args:
        part: The task.
        doc: The document.
        responses: lm-eval's responses to the document's requests.
        text: The answer to report if the task scores given texts.
    """
    task, kind = part.task, part.task.OUTPUT_TYPE
    response_of_sample = responses[0] if part.repeats > 1 else None
    better = task.higher_is_better()
    verdicts = {}
    # Repeat the response, because filters that use the first 8 responses require as many.
    for name, filtered, measures in compute_metrics(
        part, doc, [[response] * part.repeats for response in responses]
    ):
        credit = _credit(measures, better)
        if kind == "loglikelihood_rolling":
            answer = None
        elif part.scored:
            answer = text
        else:
            answer = _answer(filtered[0])
        correct = credit is not None and credit >= 1
        if answer in _NOTHING and not correct:
            answer = None
        elif answer is None and correct:
            answer = ""
        partial = credit if credit is not None and 0 < credit < 1 else None
        verdicts[name] = MetricVerdict(answer, correct, partial, measures, response_of_sample)
    return verdicts


def compute_metrics(
    part: TaskPart, doc: Any, responses: Sequence[list[Any]]
) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Return (filter, filtered responses, metrics) of a document for each filter.

    A filter that needs more responses than there are is left out.

    Args:
        part: The task.
        doc: The document.
        responses: For each request, all responses that a filter sees together.
    """
    instances = [
        Instance(
            part.task.OUTPUT_TYPE,
            doc,
            (),
            at,
            (part.name, 0, len(doc_responses)),
            list(doc_responses),
        )
        for at, doc_responses in enumerate(responses)
    ]
    metrics = []
    for ensemble in part.task._filters:
        try:
            ensemble.apply(instances)
        except AssertionError:
            if len(responses[0]) >= part.repeats:
                raise
            continue
        filtered = [instance.filtered_resps[ensemble.name] for instance in instances]
        measures = part.task.process_results(doc, filtered)
        metrics.append((ensemble.name, filtered, dict(measures)))
    return metrics


def _credit(measures: Mapping[str, Any], better: Mapping[str, bool]) -> float | None:
    """Return the first metric from 0 to 1 for which higher is better; None if there is none."""
    for name, value in measures.items():
        if not better.get(name, True) or not is_number(value):
            continue
        if 0 <= float(value) <= 1:
            return float(value)
    return None


def is_number(value: object) -> bool:
    """Return whether a measure is a number, unlike the measures of corpus metrics."""
    try:
        return not isinstance(value, str) and math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _answer(filtered: Any) -> str:
    return filtered if isinstance(filtered, str) else json.dumps(filtered, default=str)


Values = dict[tuple[str, str], list[list[Any]]]
"""For each metric and filter: the measures of each document's samples."""


def build_report(
    name: str,
    version: str,
    filters: Sequence[str],
    parts: Sequence[TaskPart],
    groups: Sequence[Any],
    scores: Sequence[SampleScore],
    options: ReportOptions,
) -> Report:
    """Return the report of a run: metrics of groups and tasks, pass@k and maj@k.

    Args:
        name: Name of the run's task.
        version: Version of the run's task.
        filters: Names of the filters.
        parts: The tasks of the run.
        groups: lm-eval's groups, outer ones first.
        scores: Scores of the samples.
        options: Options of the report.
    """
    is_generated = not parts[0].scored
    of = parts[0].name if len(parts) == 1 else name
    base = summarize(scores, options, task=of, version=version, filters=filters)
    samples: dict[str, list[SampleScore]] = {}
    for score in scores:
        samples.setdefault(score.problem_id, []).append(score)
    rows: list[MetricRow] = []
    entries: dict[str, dict[str, Any]] = {}
    for part in parts:
        part_samples = [samples[problem] for problem in part.docs if problem in samples]
        values = _values(part, part_samples)
        part_rows = [*_rows(part, values), *_iter_missing_rows(part, values)]
        rows += part_rows
        entry: dict[str, Any] = {
            "name": part.name,
            "alias": part.name,
            "sample_len": len(part_samples),
        }
        for row in part_rows:
            entry[f"{row.metric},{row.filter}"] = row.value
            entry[f"{row.metric}_stderr,{row.filter}"] = "N/A" if row.stderr is None else row.stderr
        entries[part.name] = entry
    of_groups = [row for group in groups for row in _group_rows(group, entries, parts)]
    more = [
        row
        for row in base.metrics
        if is_generated and (row.metric.startswith("pass@") or row.metric.startswith("truncated"))
    ]
    return replace(
        base,
        metrics=(*of_groups, *rows, *more),
        majority=base.majority if is_generated and options.num_samples > 1 else (),
    )


def _values(part: TaskPart, documents: Sequence[Sequence[SampleScore]]) -> Values:
    measures_of: Values = {}
    for samples in documents:
        values_of: dict[tuple[str, str], list[Any]] = {}
        for name, measures in _judgements(part, samples):
            for metric, value in measures.items():
                values_of.setdefault((metric, name), []).append(value)
        for key, values in values_of.items():
            measures_of.setdefault(key, []).append(values)
    return measures_of


def _judgements(
    part: TaskPart, samples: Sequence[SampleScore]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield filters and measures, of each sample or of all together if the task scores them so."""
    verdicts = [
        {
            name: verdict
            for name, verdict in sample.verdicts.items()
            if isinstance(verdict, MetricVerdict)
        }
        for sample in samples
    ]
    if part.repeats > 1 and samples:
        first = part.filters[0]
        texts = [by_name[first].response for by_name in verdicts if first in by_name]
        for name, _, measures in compute_metrics(part, part.docs[samples[0].problem_id], [texts]):
            yield name, measures
        return
    for by_name in verdicts:
        for name in part.filters:
            if name in by_name:
                yield name, by_name[name].measures


def _iter_missing_rows(part: TaskPart, values: Values) -> Iterator[MetricRow]:
    """Yield rows without a value for filters that need more samples than were drawn."""
    metrics = {name for _, name in values}
    for name in part.filters if values and part.repeats > 1 else ():
        if name not in metrics:
            why = f"it takes {part.repeats} samples of each problem together; draw as many"
            metric = next(iter(part.task.aggregation()), "metric")
            yield _row(part, name, metric, value=None, reason=why)


def _rows(part: TaskPart, values: Values) -> Iterator[MetricRow]:
    aggregation, better = part.task.aggregation(), part.task.higher_is_better()
    for (metric, name), documents in values.items():
        how = aggregation.get(metric, mean)
        if how is mean and all(is_number(v) for doc_values in documents for v in doc_values):
            values_of = [
                math.fsum(map(float, doc_values)) / len(doc_values) for doc_values in documents
            ]
            fields = _mean(values_of)
        else:
            fields = _aggregate_corpus(how, documents)
        yield _row(part, name, metric, higher_is_better=bool(better.get(metric, True)), **fields)


def _row(part: TaskPart, name: str, metric: str, **fields: Any) -> MetricRow:
    """Return the row of a metric.

    Args:
        part: The task.
        name: Name of the filter.
        metric: Name of the metric.
        fields: The other fields of the row.
    """
    head: dict[str, Any] = {"task": part.name, "version": part.version, "filter": name}
    return MetricRow(**head, num_fewshot=part.num_fewshot, metric=metric, **fields)


def _mean(values: Sequence[float]) -> dict[str, Any]:
    if all(0 <= value <= 1 for value in values):
        return mean_row(values)
    return {"value": math.fsum(values) / len(values), "stderr": standard_error(values)}


def _aggregate_corpus(how: Any, documents: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return a corpus metric: its mean over the first samples of all documents, the second, ..."""
    max_values = max(map(len, documents))
    scores = [
        float(how([doc_values[at] for doc_values in documents if at < len(doc_values)]))
        for at in range(max_values)
    ]
    value = math.fsum(scores) / len(scores)
    if not math.isfinite(value):
        return {"value": None, "reason": f"lm-eval's aggregation gives {value}"}
    return {"value": value}


def _group_rows(
    group: Any, entries: Mapping[str, Mapping[str, Any]], parts: Sequence[TaskPart]
) -> Iterator[MetricRow]:
    part_of = {part.name: part for part in parts}
    group_parts = [
        part_of[task.task_name] for task in group.get_all_tasks() if task.task_name in part_of
    ]
    shots = {part.num_fewshot for part in group_parts}
    better: dict[str, bool] = {}
    for part in group_parts:
        better |= part.task.higher_is_better()
    entries_with_values = {
        name: {key: value for key, value in entry.items() if value is not None}
        for name, entry in entries.items()
    }
    aggregated = group.aggregate(entries_with_values)
    for key, value in aggregated.items():
        metric, comma, name = key.rpartition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = aggregated.get(f"{metric}_stderr,{name}")
        yield MetricRow(
            task=group.name,
            version=group.version,
            filter=name,
            num_fewshot=next(iter(shots)) if len(shots) == 1 else None,
            metric=metric,
            value=float(value),
            stderr=None if error in (None, "N/A") else float(error),
            higher_is_better=bool(better.get(metric, True)),
        )
