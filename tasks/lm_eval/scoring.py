"""Scores responses with lm-eval's own filters and metrics."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lm_eval.api.instance import Instance

from treegen.evals.verdict import MetricVerdict
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
        Instance(part.task.OUTPUT_TYPE, doc, (), at, (part.name, 0, len(mine)), list(mine))
        for at, mine in enumerate(responses)
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
