"""Scoring of the samples of a run, and aggregation of the scores into a report.

Nothing here imports torch, because scoring a stored run needs no model.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from treegen.errors import TaskError
from treegen.evals.config.stop_rule import NEVER
from treegen.evals.early_stopping import Rounds
from treegen.evals.job import Job
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.run_verdicts import NO_VERDICTS, RunVerdicts, Verdicts
from treegen.evals.scoring.vote_tables import NO_VOTES, VoteInputs, stop_tables, vote_table
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.weighted import read_numbers
from treegen.evals.task_calls import wrap_task_method
from treegen.evals.thinking import load_thinking
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs import RunDir


def score_samples(
    job: Job,
    run: RunDir,
    on_sample: Callable[[dict[str, Any], SampleScore | None], None],
    *,
    program_scoring: ProgramScoring | None = None,
    rounds: Rounds | None = None,
    rescore: bool = False,
    verdicts: RunVerdicts | None = None,
) -> None:
    """Read every stored sample once, and call `on_sample` with the sample and its score.

    If the task declares answer types, equal answers of a problem become equal strings in the
    scores only when this function returns. Equal verdicts are one object, which saves memory.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        on_sample: Called with each stored sample and its score, which is None for a program
            without a verdict.
        program_scoring: The verdicts on programs; None if samples are not programs.
        rounds: Early stopping; receives each sample too. None without early stopping.
        rescore: Whether to score all samples, including those with cached verdicts.
        verdicts: The verdicts that are known; by default those that `VerdictCache` has.

    Raises:
        RunError: a record is corrupt, or the file changed while it was read.
    """
    headline = job.task.filters[0]
    problem_ids = {problem.id: problem.id for problem in job.data.problems}
    if verdicts is None or not verdicts.is_for(job):
        verdicts = RunVerdicts(job)
    scored: Iterable[tuple[dict[str, Any], Any, Any]]
    if program_scoring is None:
        scored = verdicts.read_unified(run, rescore=rescore)
    else:
        scored = ((record, v := program_scoring.verdicts(record), v) for record in run.records())
    for record, raw, verdicts_of_sample in scored:
        if rounds is not None:
            _add_sample(rounds, record, raw.get(headline) if raw else None)
        by_length = NO_VERDICTS
        if verdicts_of_sample and "choice_logprobs" in record:
            by_length = verdicts.of_length_normalized(record, verdicts_of_sample)
        score = None
        if verdicts_of_sample is not None:
            # All scores of a problem share one string as its id.
            score = build_sample_score(
                problem_ids[record["problem_id"]], record, verdicts_of_sample, by_length
            )
        on_sample(record, score)
    if rounds is not None:
        rounds.take_due()
        run.num_not_drawn = rounds.num_not_drawn


def build_sample_score(
    problem_id: str,
    record: Mapping[str, Any],
    verdicts: Verdicts,
    by_length: Verdicts = NO_VERDICTS,
) -> SampleScore:
    """Return the score of a stored sample.

    Args:
        problem_id: The problem of the sample.
        record: The stored sample.
        verdicts: The verdicts on the sample, by filter.
        by_length: As in `SampleScore`.
    """
    thinking = load_thinking(record) if "thinking" in record else None
    return SampleScore(  # positional arguments, because they are faster than keywords
        problem_id,
        record["sample_index"],
        sys.intern(record["finish_reason"] or ""),
        verdicts,
        by_length,
        read_numbers(record),
        record["num_tokens"],
        None if thinking is None else thinking.is_closed,
    )


def aggregate(
    job: Job,
    scores: Sequence[SampleScore],
    rounds: Rounds | None = None,
    votes: VoteInputs = NO_VOTES,
) -> Report:
    """Return the report on scored samples of a job.

    Args:
        job: The job of the run.
        scores: The scored samples, in any order.
        rounds: Early stopping, for tables of the votes at which problems stopped; None without it.
        votes: Verifier scores and picks of samples, which are not in their records.
    """
    settings = job.settings
    # Sorted by problem, so that the report does not depend on the order in which samples ended.
    index_of = {problem.id: number for number, problem in enumerate(job.data.problems)}
    groups: list[list[SampleScore]] = [[] for _ in index_of]
    for score in scores:
        groups[index_of[score.problem_id]].append(score)
    for group in groups:
        group.sort(key=attrgetter("sample_index"))
    scores = list(chain.from_iterable(groups))
    fixed, num = scores, settings.num_samples
    if settings.stop_when != NEVER:
        # Only samples that are drawn before any stop; see `treegen.evals.early_stopping`.
        num = settings.first_round
        fixed = [sample for sample in scores if sample.sample_index < num]
    options = ReportOptions(
        problem_ids=[problem.id for problem in job.data.problems],
        num_samples=num,
        num_fewshot=job.data.num_fewshot,
        pass_ks=_up_to(num, settings.pass_ks),
        maj_ks=_up_to(num, settings.maj_ks),
        pass_hat_ks=_up_to(num, settings.pass_hat_ks) or (),
        problems=job.data.problems,
    )
    report = wrap_task_method(job.task.aggregate, job.task.name)(fixed, options)
    if not isinstance(report, Report):
        name = type(report).__name__
        raise TaskError(f"aggregate of task {job.task.name!r} must return a Report, got {name}")
    tables = list(report.tables)
    if rounds is not None:
        tables += stop_tables(job, scores, rounds)
    if settings.votes:
        ks = options.maj_ks or (num,)
        tables.append(
            vote_table(fixed, job.task.filters, settings.votes, ks, votes, job.data.problems)
        )
    return replace(report, label=job.data.label, tables=tuple(tables))


def _up_to(num: int, ks: Sequence[int] | None) -> Sequence[int] | None:
    return None if ks is None else [k for k in ks if k <= num]


def rounds_of(job: Job) -> Rounds | None:
    """Create the sampling rounds of a job, before any sample; None without early stopping."""
    if not job.settings.in_rounds:
        return None
    kind = job.task.answer_types.get(job.task.filters[0])
    ids = [problem.id for problem in job.data.problems]
    return Rounds(job.settings, ids, kind.representatives if kind else None)


def restore_rounds(job: Job, run: RunDir, verdicts: RunVerdicts | None = None) -> Rounds | None:
    """Return the rounds of a run after its stored samples; None without early stopping.

    This also sets how many samples of the run need not be drawn.

    Args:
        job: The job of the run.
        run: The run.
        verdicts: The verdicts that are known; by default none.
    """
    rounds = rounds_of(job)
    if rounds is None:
        return None
    if rounds.reads_answers:
        for record, by_filter in (verdicts or RunVerdicts(job)).read_stored(run):
            _add_sample(rounds, record, by_filter.get(job.task.filters[0]))
    else:
        for record in run.records():
            _add_sample(rounds, record, None)
    rounds.take_due()
    run.num_not_drawn = rounds.num_not_drawn
    return rounds


def _add_sample(rounds: Rounds, record: Mapping[str, Any], first: Verdict | None) -> None:
    """Add a stored sample to the rounds.

    Args:
        rounds: The rounds.
        record: The stored sample.
        first: Its verdict by the first filter; None if it has none.
    """
    rounds.add(record, first.answer if rounds.reads_answers and first is not None else None)
