"""Loads a search run as a run in which each search is one sample: its best path.

So all code that shows or compares runs accepts search runs. Their only filter is `solved`.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Unpack

from treegen.errors import TreegenError
from treegen.evals.config.base import (
    OpenRunOptions,
    drop_unset,
    explain_moved_data,
    find_moved_files,
    overrides_run,
)
from treegen.evals.progress.usage import load_attempts, read_timeline
from treegen.evals.statistics.metrics import (
    Incomplete,
    MetricRow,
    Report,
    clusters_of,
    mean_row,
)
from treegen.evals.verdict import Verdict
from treegen.report.changed_scores import ChangedNotice, describe_change
from treegen.report.view import (
    ProblemView,
    RunView,
    Sample,
    StoredTree,
    check_settings,
    describe_problem,
    describe_unread,
    read_trees,
    task_name,
)
from treegen.runs import SearchRunDir

if TYPE_CHECKING:
    from treegen.evals.search.job import SearchJob
    from treegen.runs import RunInfo

_SOLVED = "solved"


def load_search_run(path: Path, **options: Unpack[OpenRunOptions]) -> RunView:
    """Read a search run; see `treegen.report.load.load_run`."""
    with SearchRunDir.open(path) as run:
        check_settings(run.info, path)
        notices = list(run.notices)
        job = _load_job(run, options, notices)
        order = {problem_id: number for number, problem_id in enumerate(run.info.problem_ids)}
        stored = read_trees(path)  # in the order of completion
        trees = tuple(sorted(stored, key=lambda t: (order.get(t.problem_id, -1), t.repeat)))
        if run.missing > 0:
            notices.append(f"{run.missing:,} of {run.info.planned:,} searches are not finished yet")
        if failed := [tree for tree in trees if tree.error]:
            first = failed[0]
            searches = "1 search" if len(failed) == 1 else f"{len(failed):,} searches"
            error = "the error" if len(failed) == 1 else "the first error"
            notices.append(
                f"{searches} failed; {error}, in the search of problem {first.problem_id}: "
                f"{first.error}"
            )
        notices += _describe_changes(run, trees)
        problems = _build_problems(run, job, trees)
        # None if the task chose the number of few-shot examples, and its data cannot be read.
        num_fewshot = job.data.num_fewshot if job else run.info.free.get("num_fewshot")
        usage = _sum_usage(run, trees)
        info = run.info
    return RunView(
        name=path.resolve().name,
        path=path,
        info=info,
        task=task_name(info),
        source=job.data.source if job else str(info.free.get("data") or ""),
        num_samples=max(1, run.info.planned // max(1, len(run.info.problem_ids))),
        problems=problems,
        filters=(_SOLVED,) if any(tree.solved is not None for tree in trees) else (),
        report=_build_report(info, problems, num_fewshot),
        usage=usage,
        timeline=read_timeline(path),
        trees=trees,
        notices=tuple(notices),
        searched=True,
    )


def _load_job(run: SearchRunDir, options: OpenRunOptions, notices: list[str]) -> "SearchJob | None":
    """Return the job of a run as `treegen.report.load` does, without importing its method."""
    from treegen.evals.identity import check_same_task
    from treegen.evals.search.job import load_search_job
    from treegen.evals.search.settings import resolve_search_settings, stored_search_choices

    try:
        stored = find_moved_files(run.path, stored_search_choices(run.info))
        settings = resolve_search_settings(drop_unset(options), stored, reading=True)
        with explain_moved_data(stored.get("data") if options.get("data") is None else None):
            job = load_search_job(settings)
        check_same_task(job, run.info.identity, str(run.path))
    except TreegenError as error:
        if overrides_run(options):
            raise
        notices.append(describe_unread(error, searched=True))
        return None
    return job


def _describe_changes(run: SearchRunDir, trees: tuple[StoredTree, ...]) -> list[ChangedNotice]:
    """Return a sentence if results.json has another number of solved searches than the trees."""
    results = run.stored_results()
    if results.get("done") != len(trees):
        return []
    before, now = results.get("num_solved"), sum(tree.solved is True for tree in trees)
    if not isinstance(before, int) or before == now:
        return []
    change = describe_change(f"{before:,} solved searches", f"the trees have {now:,}")
    return [ChangedNotice(change)]


def _sum_usage(run: SearchRunDir, trees: tuple[StoredTree, ...]) -> dict[str, Any]:
    """Return the usage of the run, summed over the usage that each search recorded."""

    def total(name: str) -> int:
        return sum(int(tree.usage.get(name) or 0) for tree in trees)

    seconds = math.fsum(float(part.get("seconds") or 0) for part in load_attempts(run))
    tokens = sum(tree.num_tokens for tree in trees)
    return {
        "prompt_tokens_computed": total("tokens_prefilled"),
        # Counts the whole prompt of each call, so nothing is added to it.
        "prompt_tokens_unshared": total("tokens_reprompted"),
        "sample_tokens": tokens,
        "decoded_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "samples": len(trees),
        "samples_accounted": len(trees),
    }


def _build_problems(
    run: SearchRunDir, job: "SearchJob | None", trees: tuple[StoredTree, ...]
) -> tuple[ProblemView, ...]:
    problem_of = {problem.id: problem for problem in job.data.problems} if job else {}
    trees_of: dict[str, list[StoredTree]] = {}
    for tree in trees:
        trees_of.setdefault(tree.problem_id, []).append(tree)
    return tuple(
        ProblemView(
            id=problem_id,
            **describe_problem(problem_of.get(problem_id)),
            samples=tuple(map(_to_sample, trees_of.get(problem_id, ()))),
        )
        for problem_id in run.info.problem_ids
    )


def _to_sample(tree: StoredTree) -> Sample:
    """Return the best path of a search as a sample of its problem."""
    solved = None if tree.solved is None else {_SOLVED: _to_verdict(tree)}
    path = tree.path[1:]
    return Sample(
        problem_id=tree.problem_id,
        index=tree.repeat,
        text="".join(str(node["text"]) for node in path),
        num_tokens=tree.num_tokens,
        logprob=sum(node["logprob"] or 0.0 for node in path) if path else None,
        finish_reason=tree.stopped or "stop",
        verdicts=solved,
        searched=True,
    )


def _to_verdict(tree: StoredTree) -> Verdict:
    # A solved problem has an answer, even if its record does not contain it.
    answer = "(solved)" if tree.solved and tree.answer is None else tree.answer
    return Verdict(answer, bool(tree.solved))


def _build_report(
    info: "RunInfo", problems: tuple[ProblemView, ...], num_fewshot: int | None
) -> Report | None:
    """Return a report with the share of solved problems."""
    shares = {
        problem.id: fmean(verdict.correct for verdict in verdicts)
        for problem in problems
        if (verdicts := [v for s in problem.samples if (v := s.verdict(_SOLVED)) is not None])
    }
    if not shares:
        return None
    task = info.identity.get("task", {})
    row = MetricRow(
        task=task_name(info),
        version=str(task.get("version", "")),
        filter=_SOLVED,
        num_fewshot=num_fewshot,
        metric=_SOLVED,
        **mean_row([*shares.values()], clusters=clusters_of(problems, [*shares])),
    )
    done = sum(len(problem.samples) for problem in problems)
    repeats = max(1, info.planned // max(1, len(problems)))
    missing = tuple(
        Incomplete(p.id, len(p.samples), repeats) for p in problems if len(p.samples) < repeats
    )
    num_searched = sum(bool(problem.samples) for problem in problems)
    return Report((row,), (), num_searched, done, missing)
