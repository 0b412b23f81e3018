"""Loads a run from its directory: its settings, samples, verdicts and stored judgements."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from treegen.common.lifetimes import pause_gc
from treegen.errors import InputError, RunError, TreegenError
from treegen.evals.config.base import OpenRunOptions, overrides_run
from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.pipeline import load_juries, progress_of
from treegen.evals.judging.prompts import addresses_judge
from treegen.evals.judging.settings import JudgeRun
from treegen.evals.judging.summary import Summary, summarize
from treegen.evals.judging.summary_tables import continue_commands
from treegen.evals.progress.usage import load_attempts, read_timeline, sum_usage
from treegen.evals.statistics.metrics import Report
from treegen.evals.statistics.tables import Cell, Table
from treegen.evals.thinking import load_thinking
from treegen.evals.verdict import SampleScore, Verdict
from treegen.report.changed_scores import ChangedNotice, describe_changed_scores
from treegen.report.load_search import load_search_run
from treegen.report.view import FILE as TREES
from treegen.report.view import (
    ProblemView,
    RunView,
    Sample,
    check_settings,
    describe_problem,
    describe_unread,
    read_trees,
    task_name,
)
from treegen.runs import RunDir
from treegen.runs.images import RunImages

if TYPE_CHECKING:
    from treegen.evals.early_stopping import Rounds
    from treegen.evals.job import Job
    from treegen.evals.scoring.run_verdicts import RunVerdicts

_MAX_ROWS: Final = 10


@dataclass(frozen=True, slots=True)
class JudgingProgress:
    """The numbers of stored and planned judgements of a run."""

    done: int = 0
    """The number of stored judgements."""
    planned: int = 0
    """The number of judgements once judging is complete."""
    unfinished: tuple[JudgeRun, ...] = ()
    """The judge runs with missing judgements."""


def describe_missing_samples(run: RunDir) -> str:
    """Return a sentence about the samples that an unfinished run lacks."""
    imported = "imported" in run.info.identity
    why = "have no score in the log" if imported else "are not drawn yet"
    notice = f"{run.missing:,} of {run.info.planned:,} samples {why}"
    if run.missing < run.info.planned:
        notice += "; the results are those of the other samples"
    return notice


def describe_missing(path: Path, progress: JudgingProgress) -> list[str]:
    """Return a sentence that says how many judgements are missing; an empty list if none is.

    Args:
        path: The run directory.
        progress: The numbers of judgements.
    """
    if progress.done >= progress.planned:
        return []
    missing = f"{progress.planned - progress.done:,} judgements are missing"
    if not progress.unfinished:
        return [f"{missing}; to add them, repeat the call or the command that was interrupted"]
    commands = " && ".join(continue_commands(path, progress.unfinished))
    return [f"{missing}; to add them, run: {commands}"]


def count_judgements(
    path: Path, juries: Iterable[Sequence[JudgementSet]], samples: Sequence[tuple[str, int]]
) -> JudgingProgress:
    """Return how many judgements of a run are stored, and how many are planned.

    Comparisons of pairs are not counted, because the other runs may be gone.

    Args:
        path: The run directory.
        juries: Stored judge runs, grouped in juries.
        samples: Problem id and sample index of each sample.
    """
    done = planned = 0
    unfinished = []
    for judged in (judged for jury in juries for judged in jury):
        if not judged.judging.settings.rubric.pairs:
            num_done, num_planned = progress_of(path, judged.judging, samples)
            done, planned = done + num_done, planned + num_planned
            if num_done < num_planned:
                unfinished.append(judged.judging)
    return JudgingProgress(done, planned, tuple(unfinished))


def load_summaries(
    path: Path, groups: Mapping[str, str], samples: Sequence[tuple[str, int]], notices: list[str]
) -> list[Summary]:
    """Return a summary of each group of judge runs that is stored with a run.

    Args:
        path: The run directory.
        groups: The group of each problem, by problem id.
        samples: Problem id and sample index of each sample.
        notices: Gets a sentence if judgements cannot be read, or if some are missing.
    """
    summaries: list[Summary] = []
    try:
        juries = load_juries(path)
        summaries += (summarize(jury, groups=groups) for jury in juries)
        notices += describe_missing(path, count_judgements(path, juries, samples))
    except (InputError, RunError) as error:
        notices.append(f"judgements cannot be shown: {error}")
    return summaries


def build_flagged_table(texts: Iterable[tuple[str, int, str]]) -> Table | None:
    """Return a table of the answers that seem to address their judge; None if there are none.

    Args:
        texts: Problem id, sample index and text of each answer.
    """
    flagged = [
        (problem, index, reasons)
        for problem, index, text in texts
        if (reasons := addresses_judge(text))
    ]
    if not flagged:
        return None
    rows: list[tuple[Cell, ...]] = [
        (problem, index, "; ".join(reasons)) for problem, index, reasons in flagged[:_MAX_ROWS]
    ]
    title = "1 answer addresses" if len(flagged) == 1 else f"{len(flagged):,} answers address"
    title += " the judge"
    more = f", such as {len(rows):,} of them" if len(rows) < len(flagged) else ""
    return Table(title + more, ("Problem", "Sample", "What they do"), tuple(rows))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among some paths, and those one level below the other paths.

    Raises:
        RunError: a path is not a run and contains none.
    """
    directories: dict[Path, Path] = {}  # by resolved path, because two paths may be one directory
    for path in paths:
        # os.path, because a Path raises for names that are too long.
        own_file = [path / "run.json"] if os.path.exists(path / "run.json") else []
        run_files = own_file or (sorted(path.glob("*/run.json")) if os.path.isdir(path) else [])
        if not run_files:
            RunDir.open(path).close()  # raises an error with the reason
        for file in run_files:
            directories.setdefault(file.parent.resolve(), file.parent)
    return list(directories.values())


@pause_gc()
def load_run(
    path: Path, verdicts: "RunVerdicts | None" = None, **options: Unpack[OpenRunOptions]
) -> RunView:
    """Read a run and score its samples; programs keep their stored verdicts.

    Data that cannot be read again are left out, with a sentence in `notices`. Code that a run names
    is run only if the caller names or allows it.

    Args:
        path: The directory of the run.
        verdicts: The verdicts that are known from drawing the samples.
        options: See `treegen.evals.config.base.OpenRunOptions`.

    Raises:
        RunError: there is no run, or it is corrupt.
        InputError: `data` or `task` are not the problems or the task of the run.
    """
    # os.path, because a Path raises for names that are too long.
    if os.path.exists(path / TREES) and not os.path.exists(path / "samples.jsonl"):
        return load_search_run(path, **options)
    with RunDir.open(path) as run:
        check_settings(run.info, path)
        notices = list(run.notices)
        job = _load_job(run, options, notices)
        images = _load_images(path, notices)
        problems, report, rounds = _score_samples(run, job, images, notices, verdicts)
        decides = rounds is not None and rounds.reads_answers
        summaries, judged = _load_judgements(path, problems, notices)
        if run.missing > 0:
            notices.append(describe_missing_samples(run))
        notices += _describe_changes(run, report)
        return RunView(
            name=path.resolve().name,
            path=path,
            info=run.info,
            task=task_name(run.info),
            source=job.data.source if job else str(run.info.free.get("data") or ""),
            num_samples=run.info.identity.get("num_samples", 1),
            problems=problems,
            filters=_order_filters(report, problems),
            report=report,
            tree=job.tree if job else None,
            usage=_sum_usage(run, problems),
            timeline=read_timeline(path),
            trees=read_trees(path),
            notices=tuple(notices),
            fixed=job.settings.first_round if job is not None and decides else None,
            voters=rounds.voters() if rounds is not None and decides else None,
            summaries=summaries,
            judged=judged,
            images=images,
            job=job,
        )


def _load_images(path: Path, notices: list[str]) -> RunImages:
    """Return the images of a run; empty if they cannot be read.

    Args:
        path: The directory of the run.
        notices: Receives a sentence about missing images.
    """
    try:
        images = RunImages.read(path)
    except RunError as error:
        notices.append(f"images are not shown: {error}")
        return RunImages(path)
    if left_out := images.num_left_out:
        notices.append(
            f"{left_out:,} of {len(images.images):,} images are not stored in the run, so they are "
            "not shown"
        )
    return images


def _load_job(run: RunDir, options: OpenRunOptions, notices: list[str]) -> "Job | None":
    """Return the job of a run; None if its data or task cannot be read.

    Args:
        run: The run.
        options: See `treegen.evals.config.base.OpenRunOptions`.
        notices: Receives a sentence if the result is None.

    Raises:
        TreegenError: the data or task that `options` name cannot be read.
    """
    from treegen.evals.identity import load_stored_job

    try:
        job = load_stored_job(options, run)
    except TreegenError as error:
        if overrides_run(options):
            raise
        notices.append(describe_unread(error, searched=False))
        return None
    return job


def _score_samples(
    run: RunDir,
    job: "Job | None",
    images: RunImages,
    notices: list[str],
    verdicts: "RunVerdicts | None" = None,
) -> "tuple[tuple[ProblemView, ...], Report | None, Rounds | None]":
    """Read and score the samples of a run in one pass.

    Args:
        run: The run.
        job: Its job; None leaves the samples unscored.
        images: Its images.
        notices: Receives a sentence if some samples are not scored.
        verdicts: The verdicts that are known from drawing the samples.

    Returns:
        The problems with their samples, the report, and the rounds of early stopping.
    """
    from treegen.evals.scoring.samples import aggregate, rounds_of, score_samples
    from treegen.evals.scoring.vote_tables import VoteInputs

    collected = _ProblemCollector(run, job, images)
    if job is None:
        for record in run.records():
            collected.add(record, None)
        return collected.build_views(), _stored_report(run), None
    scores: list[SampleScore] = []
    num_unscored = 0

    def collect(record: dict[str, Any], score: SampleScore | None) -> None:
        nonlocal num_unscored
        collected.add(record, None if score is None else score.verdicts)
        if score is None:
            num_unscored += 1
        else:
            scores.append(score)

    rounds = rounds_of(job)
    if job.task.executes_code:
        with closing(job.task.open_scoring(run, None)) as program_scoring:
            score_samples(job, run, collect, program_scoring=program_scoring, rounds=rounds)
    else:
        score_samples(job, run, collect, rounds=rounds, verdicts=verdicts)
    if num_unscored:
        notices.append(
            f"{num_unscored:,} samples are not scored; score them with: treegen score "
            f"{shlex.quote(str(run.path))} --allow-code-execution"
        )
    report = aggregate(job, scores, rounds, VoteInputs.of(run.path)) if scores else None
    return collected.build_views(), report, rounds


def _load_judgements(
    path: Path, problems: Sequence[ProblemView], notices: list[str]
) -> "tuple[tuple[Summary, ...], tuple[Table, ...]]":
    """Return the judgements of the samples; nothing is imported for a run without judgements."""
    if not (path / "judged").is_dir():
        return (), ()

    samples = [(p.id, s.index) for p in problems for s in p.samples]
    summaries = load_summaries(path, {p.id: p.group for p in problems}, samples, notices)
    tables = [table for summary in summaries for table in summary.tables]
    answers = ((s.problem_id, s.index, s.parts[1]) for p in problems for s in p.samples)
    flagged = build_flagged_table(answers) if summaries else None
    return tuple(summaries), (*tables, *([flagged] if flagged else []))


def _stored_report(run: RunDir) -> Report | None:
    """Return the report in results.json; None if it is missing or unreadable."""
    from pydantic import TypeAdapter  # slow to import, and needed only without the problems

    with suppress(KeyError, TypeError, ValueError):
        return TypeAdapter(Report).validate_python(run.stored_results()["report"])
    return None


def _describe_changes(run: RunDir, report: Report | None) -> list[ChangedNotice]:
    """Return a sentence if results.json has other scores than the samples.

    Results of fewer or more samples are left out, such as those from before a resume.

    Args:
        run: The run.
        report: The report of its present samples; None if they are not scored.
    """
    results = run.stored_results()
    stored = results.get("report")
    if report is None or results.get("done") != len(run.done):
        return []
    if not isinstance(stored, dict) or stored.get("num_samples") != report.num_samples:
        return []  # programs without stored verdicts have a notice of their own
    change = describe_changed_scores(stored, report.to_json())
    return [ChangedNotice(change)] if change else []


class _ProblemCollector:
    """Collects the problems of a run while its samples are read."""

    def __init__(self, run: RunDir, job: "Job | None", images: RunImages) -> None:
        self._images = images
        # By problem id: the id, as one string object that all samples share, and the samples.
        self._entries: dict[str, tuple[str, list[Sample]]] = {
            problem_id: (problem_id, []) for problem_id in run.info.problem_ids
        }
        self._tokens: dict[str, tuple[int, int]] = {}
        self._problems = {problem.id: problem for problem in job.data.problems} if job else {}

    def add(self, record: Mapping[str, Any], verdicts: Mapping[str, Verdict] | None) -> None:
        """Add a stored sample."""
        get = record.get
        problem_id, samples = self._entries[record["problem_id"]]
        self._tokens[problem_id] = get("prompt_tokens", 0), get("choice_tokens", 0)
        sample = Sample(  # positional arguments are faster than keywords
            problem_id,
            record["sample_index"],
            str(get("text", "")),
            get("num_tokens", 0),
            get("logprob"),
            sys.intern(str(get("finish_reason"))),
            verdicts,
            False,
            load_thinking(record),
        )
        samples.append(sample)

    def build_views(self) -> tuple[ProblemView, ...]:
        """Return the problems with their samples."""
        return tuple(self._build_view(problem_id) for problem_id in self._entries)

    def _build_view(self, problem_id: str) -> ProblemView:
        prompt_tokens, choice_tokens = self._tokens.get(problem_id, (0, 0))
        return ProblemView(
            id=problem_id,
            **describe_problem(self._problems.get(problem_id)),
            prompt_tokens=prompt_tokens,
            choice_tokens=choice_tokens,
            samples=tuple(sorted(self._entries[problem_id][1], key=attrgetter("index"))),
            images=self._images.of(problem_id),
        )


def _order_filters(report: Report | None, problems: Sequence[ProblemView]) -> tuple[str, ...]:
    """Return the filters in the order of the report's metrics, the headline first."""
    scored = (s.verdicts for p in problems for s in p.samples if s.verdicts is not None)
    first = next(scored, None)
    if report is None or first is None:
        return ()
    ranked = {row.filter: None for row in report.metrics if row.filter in first}
    return tuple({**ranked, **dict.fromkeys(first)})


def _sum_usage(run: RunDir, problems: Sequence[ProblemView]) -> dict[str, Any]:
    done = [len(problem.samples) for problem in problems]
    return sum_usage(
        load_attempts(run),
        num_samples=sum(done),
        unshared=sum(
            (p.prompt_tokens + p.choice_tokens) * n for p, n in zip(problems, done, strict=True)
        ),
        sample_tokens=sum(sample.num_tokens for p in problems for sample in p.samples),
    )
