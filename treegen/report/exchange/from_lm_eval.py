"""Read lm-evaluation-harness' results and logged samples: one run for each task."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from pydantic import ConfigDict, Field

from treegen.common.files import describe_read_error, path_component, read_bytes, read_lines
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError
from treegen.report.exchange.external_log import (
    Count,
    ExternalLog,
    ExternalProblem,
    ExternalSample,
    ExternalVerdict,
    Index,
    Name,
    ProblemId,
    Schema,
    Share,
    score_to_verdict,
    usable_sampling,
    validate,
)
from treegen.report.exchange.to_lm_eval import BY_RESPONSE
from treegen.report.lm_eval_documents import describe_document

# Filter functions after which a metric describes more than the first response.
_VOTES: Final = ("majority_vote", "take_first_k")
_INVALID: Final = "[invalid]"


class _Step(Schema):
    function: str = ""


class _Filter(Schema):
    name: str
    filter: list[_Step] = Field(default_factory=list)


class _Generation(Schema):
    until: str | list[str] | None = None
    max_gen_toks: Count | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


class _Config(Schema):
    num_fewshot: Count | None = None
    filter_list: list[_Filter] | None = None
    generation_kwargs: _Generation | None = None


class _Results(Schema):
    configs: dict[str, Any]
    versions: dict[str, Any] = Field(default_factory=dict)
    model_name: str | None = None
    lm_eval_version: str | None = None
    system_instruction: str | None = None


class _Response(Schema):
    """A response with its verdict, as treegen's own export adds it to lm-eval's format."""

    index: Index
    tokens: Count
    finish_reason: str | None
    answer: str | None
    correct: bool | None
    credit: Share | None
    metrics: dict[str, Any] = Field(default_factory=dict)
    """Its metrics by name, for a task of lm-eval."""


class _Row(Schema):
    """A line of samples: a document as one filter reads it. Metrics are further fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    doc_id: Count
    filter: Name
    resps: list[list[Any]] = Field(min_length=1)
    filtered_resps: list[Any] | None = None
    doc: Any = None
    target: Any = ""
    arguments: Any = None
    metrics: list[str] = Field(default_factory=list)
    by_response: list[_Response] | None = None
    problem_id: ProblemId | None = None
    """The problem's id in the run that treegen has exported."""
    group: str = ""
    """The problem's group in the run that treegen has exported."""
    question: str | None = None
    """The problem's question in the run that treegen has exported."""
    reference: str | None = None
    """The problem's reference in the run that treegen has exported."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of samples, and where it is."""

    where: str
    """The file and the number of the line."""
    row: _Row

    @property
    def values(self) -> Mapping[str, Any]:
        """The value of each metric, by name."""
        return {name: (self.row.model_extra or {}).get(name) for name in self.row.metrics}


def is_results(path: Path) -> bool:
    """Return whether a JSON file is lm-eval's results and not an Inspect log."""
    content = _read_json(path)
    return isinstance(content, dict) and "results" in content and "configs" in content


def newest_results(folder: Path) -> Path:
    """Return the newest results_TIME.json in a folder or in the folders within it.

    Raises:
        InputError: there is none.
    """
    files = [*folder.glob("results_*.json"), *folder.glob("*/results_*.json")]
    if not files:
        raise InputError(
            f"the folder {folder} contains no results_TIME.json of lm-eval; pass the folder "
            "that lm-eval wrote (--output_path)"
        )
    return max(files, key=lambda path: path.name)


def read_lm_eval(path: Path, tasks: Sequence[str] | None = None) -> list[ExternalLog]:
    """Return the content of a results file and its samples, task by task.

    Args:
        path: The results_TIME.json; the files of samples are in its folder.
        tasks: Read only these tasks; None reads all.

    Raises:
        InputError: a file cannot be read or does not have lm-eval's format, samples were not
            logged, a task is missing, or it has no scores of correctness.
    """
    results = validate(_Results, _read_json(path), str(path))
    stamp = path.stem.removeprefix("results_")
    logged: dict[str, Path] = {}
    for name in results.configs:
        if tasks and name not in tasks:
            logged[name] = path
            continue
        name = path_component(name, f"a task of {path}")
        if (file := path.with_name(f"samples_{name}_{stamp}.jsonl")).exists():
            logged[name] = file
    if not logged:
        raise InputError(f"the folder of {path} has no samples; run lm-eval with --log_samples")
    for name in tasks or ():
        if name not in logged:
            raise InputError(
                f"{path} has no samples of the task {name!r}{did_you_mean(name, logged)}"
            )
    chosen = dict.fromkeys(tasks or logged)
    return [_to_log(name, results, path, _read_lines(logged[name])) for name in chosen]


def _read_json(path: Path) -> Any:
    try:
        return _parse_json(read_bytes(path), str(path), "copy it again")
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from None


def _read_lines(path: Path) -> list[_Line]:
    lines: list[_Line] = []
    seen: dict[tuple[int, str], str] = {}
    first: dict[int, _Line] = {}
    try:
        for number, text in enumerate(read_lines(path), 1):
            where = f"{path}, line {number}"
            if not text.strip():
                continue
            line = _Line(where, validate(_Row, _parse_json(text, where, "remove the line"), where))
            if problem := _find_contradiction(line.row):
                raise InputError(f"{where}: {problem}")
            key = line.row.doc_id, line.row.filter
            if (before := seen.setdefault(key, where)) != where:
                raise InputError(
                    f"{where}: document {key[0]} already has a line for the filter "
                    f"{key[1]!r} ({before}); remove one of the two lines"
                )
            _check_same_document(line, first.setdefault(key[0], line))
            lines.append(line)
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from None
    return lines


def _parse_json(text: bytes, where: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{where} cannot be read as JSON: {reason}; {remedy}") from None


def _find_contradiction(row: _Row) -> str:
    """Return how the fields of a line contradict each other; empty if they do not."""
    if not all(row.resps):
        return "resps has a request without responses; remove the line"
    for name in row.metrics:
        if name not in (row.model_extra or {}):
            return f"metrics names {name!r:.60}, which is missing"
    if not _has_likelihoods(row) and not all(isinstance(text, str) for text in row.resps[0]):
        return "resps must contain strings; remove the line"
    if (responses := row.by_response) is None:
        return ""
    if len(responses) != len(row.resps[0]) or _has_likelihoods(row):
        return f"{BY_RESPONSE} and resps must have the same number of responses"
    are_scored = all(response.metrics or response.correct is None for response in responses)
    if len(row.metrics) > 1 and not are_scored:
        return f"the line has several metrics, so each response of {BY_RESPONSE} must have metrics"
    if len({response.index for response in responses}) < len(responses):
        return f"{BY_RESPONSE} has two responses with the same index"
    if any(response.correct and response.answer is None for response in responses):
        return f"{BY_RESPONSE} has a correct response without an answer"
    return ""


def _check_same_document(line: _Line, first: _Line) -> None:
    """Raise InputError unless two lines of a document have the same question and responses."""
    row = line.row
    if line is not first and _serialize_document(row) != _serialize_document(first.row):
        raise InputError(
            f"{line.where} and {first.where} have the same doc_id {row.doc_id}, but different "
            "documents or responses; remove one of the two lines"
        )


def _serialize_document(row: _Row) -> str:
    """Return the document and the responses as text, because NaN does not equal itself."""
    responses = [(r.index, r.tokens, r.finish_reason) for r in row.by_response or ()]
    return json.dumps([row.doc, row.target, row.resps, responses], sort_keys=True)


def _to_log(task: str, results: _Results, path: Path, lines: Sequence[_Line]) -> ExternalLog:
    config = validate(_Config, results.configs[task], f"{path}: configs.{task}")
    notices: list[str] = []
    max_responses = max(
        (len(line.row.resps[0]) for line in lines if not _has_likelihoods(line.row)), default=1
    )
    are_responses_judged = any(line.row.by_response is not None for line in lines)
    if max_responses > 1 and not are_responses_judged:
        votes = {
            filter.name
            for filter in config.filter_list or ()
            if any(step.function in _VOTES for step in filter.filter)
        }
        notices.append(
            f"lm-eval scored only one of the {max_responses} responses of each document; the other "
            "responses are left out"
        )
        if votes:
            some = ", ".join(sorted(votes))
            notices.append(f"the filters {some} score votes instead of samples and are left out")
        lines = [line for line in lines if line.row.filter not in votes]
    names = _name_filters(_get_numeric_metrics(lines, notices))
    problems: dict[int, ExternalProblem] = {}
    samples: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        row = line.row
        problems.setdefault(row.doc_id, _to_problem(line))
        for sample in _to_samples(line, names):
            before = samples.setdefault((row.doc_id, sample["index"]), sample)
            before["verdicts"] = before["verdicts"] | sample["verdicts"]
    scored = [sample for sample in samples.values() if sample["verdicts"]]
    if num_left := len(samples) - len(scored):
        notices.append(f"{num_left:,} samples have no score and are left out")
    sampling = usable_sampling(_collect_sampling(config.generation_kwargs), notices)
    recorded = [
        *sampling,
        *(["num_fewshot"] if config.num_fewshot is not None else []),
        *(["system_instruction"] if "system_instruction" in results.model_fields_set else []),
    ]
    fields: dict[str, Any] = {
        "task": task,
        "version": str(results.versions.get(task, "")),
        "model": results.model_name or "unknown",
        "source": f"lm_eval {results.lm_eval_version or ''}".strip(),
        "problems": tuple(problems.values()),
        "filters": tuple(names.values()),
        "num_samples": max([index + 1 for _, index in samples], default=1),
        "samples": tuple(
            validate(
                ExternalSample, external, f"{path}: problem {external['problem_id']} of {task}"
            )
            for external in scored
        ),
        "sampling": sampling,
        "num_fewshot": config.num_fewshot or 0,
        "system_instruction": results.system_instruction,
        "recorded": tuple(recorded),
    }
    return validate(ExternalLog, {**fields, "notices": tuple(notices)}, str(path))


def _get_numeric_metrics(lines: Sequence[_Line], notices: list[str]) -> list[tuple[str, str]]:
    """Return the filters and metrics that are numbers from 0 to 1, without bits and likelihoods.

    lm-eval takes the mean over the documents that have a metric. A document whose value is not a
    number (NaN) has none. A metric with a value outside of 0 to 1 is left out.
    """
    values_of: dict[tuple[str, str], list[Any]] = {}
    for line in lines:
        for name, value in line.values.items():
            values_of.setdefault((line.row.filter, name), []).append(value)
    pairs = [
        key
        for key, values in values_of.items()
        if any(map(_is_share, values)) and all(_is_nan(v) or _is_share(v) for v in values)
    ]
    for name in sorted({name for _, name in values_of} - {name for _, name in pairs}):
        notices.append(f"the values of {name} are not numbers from 0 to 1 and are left out")
    return pairs


def _is_share(value: object) -> TypeGuard[float]:
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _name_filters(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the name of the run's filter for each filter and metric of lm-eval.

    The name is as short as it can be without two equal names.
    """
    pairs = list(pairs)
    one = len({metric for _, metric in pairs}) == 1
    return {
        (filter, metric): metric if filter == "none" else filter if one else f"{metric},{filter}"
        for filter, metric in pairs
    }


def _has_likelihoods(row: _Row) -> bool:
    """Return whether the responses of a document are (logprob, is_greedy) pairs of choices."""
    return bool(row.resps[0]) and not isinstance(row.resps[0][0], str)


def _to_problem(line: _Line) -> ExternalProblem:
    row = line.row
    question, answer = describe_document(row.doc), str(row.target)
    if row.problem_id is not None:
        question = question if row.question is None else row.question
        answer = answer if row.reference is None else row.reference
    fields = {
        "id": row.problem_id or str(row.doc_id),
        "question": question,
        "answer": answer,
        "prompt": _find_prompt(row.arguments),
        "group": row.group,
    }
    return validate(ExternalProblem, fields, line.where)


def _find_prompt(arguments: Any) -> str:
    """Return the prompt of a document with one generation request; "" for other documents."""
    match _list_requests(arguments):
        case [[str(prompt), dict(), *_]]:
            return prompt
    return ""


def _list_requests(arguments: Any) -> list[list[Any]]:
    """Return the arguments of each request, which lm-eval logs as a list or as an object."""
    if isinstance(arguments, dict):
        arguments = [
            [*request.values()] for request in arguments.values() if isinstance(request, dict)
        ]
    if not isinstance(arguments, list):
        return []
    return [request for request in arguments if isinstance(request, list)]


def _to_samples(line: _Line, names: Mapping[tuple[str, str], str]) -> Iterable[dict[str, Any]]:
    row = line.row
    scored = {
        name: (names[row.filter, name], value)
        for name, value in line.values.items()
        if (row.filter, name) in names and not _is_nan(value)
    }
    problem_id = _to_problem(line).id
    if row.by_response is not None:
        for response, text in zip(row.by_response, row.resps[0], strict=True):
            yield {
                "problem_id": problem_id,
                "index": response.index,
                "text": text,
                "verdicts": _to_verdicts(
                    response, text, {metric: name for metric, (name, _) in scored.items()}
                ),
                "num_tokens": response.tokens,
                "finish_reason": response.finish_reason or "",
            }
        return
    answer: str | None
    if _has_likelihoods(row):
        text, answer = _pick_most_likely_choice(line)
    else:
        text, filtered = row.resps[0][0], row.filtered_resps or [None]
        read = filtered[0][0] if isinstance(filtered[0], list) and filtered[0] else filtered[0]
        answer = None if read is None or read == _INVALID else str(read)
    yield {
        "problem_id": problem_id,
        "index": 0,
        "text": text,
        "verdicts": {
            name: score_to_verdict(value, answer, text) for name, value in scored.values()
        },
    }


def _to_verdicts(
    response: _Response, text: str, names: Mapping[str, str]
) -> dict[str, ExternalVerdict]:
    """Return the verdicts on a response of a run that treegen has exported.

    Args:
        response: The response.
        text: Its text.
        names: The name of the verdict for each metric.
    """
    if response.correct is None:
        return {}
    if response.metrics:
        return {
            name: score_to_verdict(value, response.answer, text)
            for metric, name in names.items()
            if _is_share(value := response.metrics.get(metric))
        }
    verdict = ExternalVerdict(
        answer=response.answer, correct=response.correct, credit=response.credit
    )
    return dict.fromkeys(names.values(), verdict)


def _pick_most_likely_choice(line: _Line) -> tuple[str, str]:
    """Return the most likely of a document's choices, as text and answer.

    lm-eval logs a choice with the space that separates it from the prompt; the text has no space.
    """
    row = line.row
    try:
        logprobs = [float(response[0][0]) for response in row.resps]
    except (TypeError, ValueError, LookupError, OverflowError):
        raise InputError(
            f"{line.where}: resps must contain strings, or (logprob, is_greedy) pairs; remove the "
            "line"
        ) from None
    best = max(range(len(logprobs)), key=logprobs.__getitem__)
    requests = _list_requests(row.arguments)
    choice = requests[best][1] if best < len(requests) and len(requests[best]) > 1 else best
    text = str(choice).strip()
    return text, text


def _collect_sampling(generation: _Generation | None) -> dict[str, Any]:
    if generation is None:
        return {}
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(generation, name)) is not None
    }
    if generation.do_sample is False:
        sampling["temperature"] = 0.0
    if generation.max_gen_toks:
        sampling["max_tokens"] = generation.max_gen_toks
    stops = (
        (generation.until,) if isinstance(generation.until, str) else tuple(generation.until or ())
    )
    return sampling | ({"stop": stops} if stops else {})
