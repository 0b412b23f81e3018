"""Match the problems of two runs for a comparison.

A run of `lm-eval:TASK` and an imported log of lm-eval's TASK have the same documents under
different names. lm-eval numbers the documents of a task; treegen adds the task's name, because a
run may have several tasks. lm-eval's log has one score for each metric and filter; a run of treegen
has one verdict for each filter, with all metrics.
"""

import filecmp
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, SupportsFloat

from treegen.errors import InputError, arg
from treegen.evals.registry import LM_EVAL
from treegen.evals.verdict import MetricVerdict, Verdict
from treegen.report.lm_eval_documents import (
    TaskWithDocuments,
    describe_document,
    dump_document,
)
from treegen.report.view import ProblemView, RunView, settings_group

_MAX_CHARS: Final = 60  # characters of a question or a reference in an error
_NO_FILTER: Final = "none"  # lm-eval's name for the filter of a task without filters
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the repr of an object, such as an image


def match_runs(a: RunView, b: RunView) -> tuple[RunView, RunView]:
    """Return two runs of the same problems, which have the same ids and order in both.

    If one of the runs is an imported log of lm-eval, it gets the names of the other run. The
    questions of two runs may differ if they come from the same data, because a task's arguments,
    such as a template, may change how a question is written.

    Args:
        a: The first run.
        b: The second run.

    Raises:
        InputError: the runs have different problems, or another task or version of it.
    """
    if _is_log_of(a, b):
        a = _rename_log(a, b)
    elif _is_log_of(b, a):
        b = _rename_log(b, a)
    _check_same_problems(a, b)
    return a, _reorder(b, a.info.problem_ids)


def _is_log_of(log: RunView, run: RunView) -> bool:
    """Return whether one run is an imported log of the lm-eval task that the other run has."""
    imported, task = settings_group(log.info, "task"), settings_group(run.info, "task")
    return (
        _is_from_lm_eval(log)
        and not _is_from_lm_eval(run)
        and task.get("name") == f"{LM_EVAL}{imported.get('name')}"
        and task.get("version") == imported.get("version")
    )


def _is_from_lm_eval(view: RunView) -> bool:
    return str(view.info.identity.get("imported", "")).startswith("lm_eval")


def _rename_log(log: RunView, run: RunView) -> RunView:
    """Return an imported log of lm-eval with the ids and filters of a run of the same task."""
    prefix = f"{settings_group(log.info, 'task')['name']}/"
    names = {i: i if i.startswith(prefix) else f"{prefix}{i}" for i in log.info.problem_ids}
    problems = {names[problem.id]: problem for problem in log.problems}
    identity = {**log.info.identity, "task": run.info.identity["task"]}
    if problems.keys() == set(run.info.problem_ids) and _has_same_content(log, run, problems):
        identity["data"] = run.info.identity.get("data")
        order = run.info.problem_ids
    else:
        order = tuple(names.values())
    metrics = _list_metrics(run)
    scores = {
        (filter, metric): name
        for filter, metrics_of_filter in metrics.items()
        for metric in metrics_of_filter
        if (name := _find_score(filter, metric, metrics_of_filter, log.filters))
    }
    return replace(
        log,
        info=replace(log.info, identity=identity, problem_ids=order),
        problems=tuple(_rename_problem(problems[i], i, scores) for i in order),
        filters=tuple(dict.fromkeys(filter for filter, _ in scores)) or log.filters,
        summaries=tuple(
            replace(s, by_problem={names.get(i, i): value for i, value in s.by_problem.items()})
            for s in log.summaries
        ),
    )


def _has_same_content(log: RunView, run: RunView, problems: Mapping[str, ProblemView]) -> bool:
    """Return whether the questions of a run are those of an imported log.

    They are in the prompts of the log. If the log has no prompt of a problem, as for tasks that
    score given texts, the log's document is compared with the document of the run's task.

    Args:
        log: The imported log.
        run: The run of treegen.
        problems: The problems of the log, by the ids of the run.
    """
    if log.job is None:
        return True
    prompts = {
        problem.id: str(problem.metadata.get("prompt", "")) for problem in log.job.data.problems
    }
    documents = _describe_documents(run)
    for problem in run.problems:
        logged = problems[problem.id]
        if prompt := prompts.get(logged.id, ""):
            if problem.question.strip() not in prompt:
                return False
        elif problem.id in documents:
            a, b = (_ADDRESS.sub("", text) for text in (documents[problem.id], logged.question))
            if a != b:
                return False
    return True


def _describe_documents(run: RunView) -> dict[str, str]:
    """Return the documents of a run of `lm-eval:TASK` as `treegen import` describes them."""
    if run.job is None or not isinstance(run.job.task, TaskWithDocuments):
        return {}
    return {
        problem_id: describe_document(json.loads(dump_document(doc)))
        for problem_id, doc in run.job.task.get_documents().items()
    }


def _list_metrics(run: RunView) -> dict[str, list[str]]:
    """Return the metrics from 0 to 1 of each filter of a run of `lm-eval:TASK`.

    Metrics for which lower is better are last, because they decide no verdict.
    """
    is_share: dict[str, dict[str, bool]] = {}
    for sample in run.samples:
        for filter, verdict in (sample.verdicts or {}).items():
            if isinstance(verdict, MetricVerdict):
                shares = is_share.setdefault(filter, {})
                for metric, value in verdict.measures.items():
                    is_number = isinstance(value, SupportsFloat) and not isinstance(value, str)
                    number = float(value) if is_number else -1.0
                    shares[metric] = shares.get(metric, True) and (
                        math.isnan(number) or 0 <= number <= 1
                    )
    rows = run.report.metrics if run.report else ()
    is_lower_better = {row.metric: not row.higher_is_better for row in rows}
    return {
        filter: sorted(
            (metric for metric, all_shares in is_share[filter].items() if all_shares),
            key=lambda metric: is_lower_better.get(metric, False),
        )
        for filter in run.filters
        if filter in is_share
    }


def _find_score(
    filter: str, metric: str, metrics: list[str], scores: tuple[str, ...]
) -> str | None:
    """Return the name of an imported score for a filter and a metric; None if there is none.

    Args:
        filter: The name of the filter.
        metric: The name of the metric.
        metrics: All metrics from 0 to 1 of the filter.
        scores: The names of the imported scores, as `treegen import` builds them.
    """
    names = [f"{metric},{filter}"]
    if filter == _NO_FILTER:
        names.insert(0, metric)
    if metrics == [metric]:
        names.append(filter)  # `treegen import` names the only metric of a log so
    return next((name for name in names if name in scores), None)


def _rename_problem(
    problem: ProblemView, problem_id: str, scores: Mapping[tuple[str, str], str]
) -> ProblemView:
    """Return a problem with another id, and with one verdict for each filter.

    Args:
        problem: The problem of an imported log.
        problem_id: Its new id.
        scores: The name of the imported score for each filter and metric.
    """
    samples = tuple(
        replace(
            sample,
            problem_id=problem_id,
            verdicts=_join_verdicts(sample.verdicts, scores)
            if sample.verdicts and scores
            else sample.verdicts,
        )
        for sample in problem.samples
    )
    return replace(problem, id=problem_id, samples=samples)


def _join_verdicts(
    verdicts: Mapping[str, Verdict], scores: Mapping[tuple[str, str], str]
) -> dict[str, Verdict]:
    """Return one verdict for each filter, with the values of all its metrics."""
    joined: dict[str, Verdict] = {}
    for (filter, metric), name in scores.items():
        if (verdict := verdicts.get(name)) is None:
            continue
        value = float(verdict.correct) if verdict.credit is None else verdict.credit
        if filter in joined:
            first = joined[filter]
            assert isinstance(first, MetricVerdict)
            joined[filter] = replace(first, measures={**first.measures, metric: value})
        else:
            joined[filter] = MetricVerdict(
                verdict.answer, verdict.correct, verdict.credit, {metric: value}
            )
    return joined


def _check_same_problems(a: RunView, b: RunView) -> None:
    """Raise InputError unless two runs are of the same problems, by the same version of a task.

    Args:
        a: The first run.
        b: The second run.
    """
    tasks = [view.info.identity.get("task") for view in (a, b)]
    if tasks[0] != tasks[1]:
        raise InputError(
            f"{a.path} is a run of {_describe_task(tasks[0])}, but {b.path} is a run of "
            f"{_describe_task(tasks[1])}; {_suggest_task(a, b)}"
        )
    first, second = set(a.info.problem_ids), set(b.info.problem_ids)
    if first != second:
        only = [
            f"{len(x - y):,} only in {view.path}"
            for x, y, view in ((first, second, a), (second, first, b))
            if x - y
        ]
        raise InputError(
            f"the runs have different problems: {len(first & second):,} in common, "
            f"{' and '.join(only)}; make both runs with the same {arg('data=')} and "
            f"{arg('limit=')}"
        )
    data = [settings_group(view.info, "data").get("problems") for view in (a, b)]
    if data[0] == data[1]:
        return
    for view in (a, b):
        if view.unread:
            raise InputError(f"{view.path} cannot be compared: {view.unread.marked}")
    if difference := _describe_different_content(a, b):
        raise InputError(
            f"the problems of {a.path} and {b.path} have the same ids but different content: "
            f"{difference}"
        )


def _describe_different_content(a: RunView, b: RunView) -> str:
    """Return in what the problems of two runs differ, and what to do; "" if they are the same.

    Args:
        a: The first run.
        b: The second run, with the same ids.
    """
    advice = f"make both runs with the same {arg('data=')}"
    second = {problem.id: problem for problem in b.problems}
    pairs = [(problem, second[problem.id]) for problem in a.problems]
    for name in ("reference", "question"):
        if name == "question" and _have_same_data(a, b):
            continue
        differing = [(x, y) for x, y in pairs if getattr(x, name) != getattr(y, name)]
        if differing:
            x, y = differing[0]
            texts = " / ".join(_shorten(getattr(problem, name)) for problem in (x, y))
            return (
                f"{len(differing):,} of {len(pairs):,} {name}s differ, such as that of {x.id!r} "
                f"({texts}); {advice}"
            )
    if a.job is None or b.job is None:
        return ""
    if any(view.job.data.problems[0].id not in second for view in (a, b) if view.job is not None):
        return f"the prompts of the log do not contain the questions of the run; {advice}"
    others = [
        {
            p.id: (p.choices, p.openings, [i.sha256 for i in p.images])
            for p in view.job.data.problems
        }
        for view in (a, b)
        if view.job is not None
    ]
    if ids := [i for i in second if others[0].get(i) != others[1].get(i)]:
        return f"the choices or images of {ids[0]!r} differ; {advice}"
    return ""


def _have_same_data(a: RunView, b: RunView) -> bool:
    """Return whether treegen made both runs from the same data file or the same bundled problems.

    Args:
        a: The first run.
        b: The second run.
    """
    if a.job is None or b.job is None or any("imported" in v.info.identity for v in (a, b)):
        return False
    options = [view.job.settings.options for view in (a, b) if view.job is not None]
    first, second = (option.data for option in options)
    if first == second:
        return options[0].split == options[1].split
    if first is None or second is None:
        return False
    with suppress(OSError):
        return filecmp.cmp(first, second, shallow=False)
    return False


def _reorder(view: RunView, problem_ids: tuple[str, ...]) -> RunView:
    """Return a run with its problems in another order.

    Args:
        view: The run.
        problem_ids: The ids of its problems in the new order.
    """
    if view.info.problem_ids == problem_ids:
        return view
    by_id = {problem.id: problem for problem in view.problems}
    return replace(
        view,
        info=replace(view.info, problem_ids=problem_ids),
        problems=tuple(by_id[i] for i in problem_ids),
    )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}...")


def _suggest_task(a: RunView, b: RunView) -> str:
    """Return what to do about runs of different tasks."""
    logs = [view for view in (a, b) if _is_from_lm_eval(view)]
    if len(logs) == 1:
        name = settings_group(logs[0].info, "task").get("name", "TASK")
        return (
            f"to compare a run with a log of lm-eval, make the run with the task {LM_EVAL}{name} "
            "and the same version of lm-eval"
        )
    return "compare runs of the same task and version"


def _describe_task(task: Any) -> str:
    is_task = isinstance(task, dict)
    return f"{task.get('name')} version {task.get('version')}" if is_task else "no task"
