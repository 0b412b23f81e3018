"""Judge the samples of a run, and sum their scores up as a report.

Nothing here imports torch, for scoring a stored run needs no model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treegen.errors import TaskError
from treegen.evals.answers import answer_types, unified
from treegen.evals.asked.stopping import NEVER, Rounds
from treegen.evals.calls import asked, verdicts_on
from treegen.evals.choices import likeliest_by_length
from treegen.evals.job import Job
from treegen.evals.judged.execution import Judging
from treegen.evals.judged.vote_tables import NO_VOTES, Votes, stop_tables, vote_table
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.thinking import thinking_of
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs import RunDir


def judged(
    job: Job, run: RunDir, judging: Judging | None = None
) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict] | None]]:
    """Yield every stored sample with its verdicts by filter; None for a program without any.

    If the task declares answer types, equal answers of a problem are equal strings here.
    """
    problems = {problem.id: problem for problem in job.data.problems}
    if not judging and (types := answer_types(job.task)):
        found = [
            (key, verdicts_on(job.task, problems[key], record))
            for record in run.records()
            for key in (record["problem_id"],)
        ]
        # Another process may have appended records in between.
        yield from zip(run.records(), asked(unified, job.task.name)(found, types), strict=False)
        return
    for record in run.records():
        if judging:
            yield record, judging.verdicts(record)
        else:
            yield record, verdicts_on(job.task, problems[record["problem_id"]], record)


def sample_scores(
    job: Job, found: Iterable[tuple[dict[str, Any], Mapping[str, Verdict] | None]]
) -> list[SampleScore]:
    """Return the scores of stored samples, leaving out those that have no verdicts."""
    problems = {problem.id: problem for problem in job.data.problems}
    scores = []
    for record, verdicts in found:
        if verdicts is None:
            continue
        thinking = thinking_of(record)
        by_length: Mapping[str, Verdict] = {}
        if "choice_logprobs" in record:
            problem = problems[record["problem_id"]]
            choice = likeliest_by_length(problem, record["choice_logprobs"])
            by_length = job.task.score(problem, choice)
        scores.append(
            SampleScore(
                problem_id=record["problem_id"],
                sample_index=record["sample_index"],
                finish_reason=record["finish_reason"],
                verdicts=verdicts,
                by_length=by_length,
                numbers=_numbers(record),
                num_tokens=record["num_tokens"],
                closed=None if thinking is None else thinking.is_closed,
            )
        )
    return scores


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what votes may weigh a stored sample by."""
    found = {}
    if record["num_tokens"] and "logprob" in record:
        found["logprob"] = record["logprob"] / record["num_tokens"]
    if (certainty := record.get("self_certainty")) is not None:
        found["certainty"] = certainty
    for name, value in record.get("confidence", {}).items():
        found["confidence" if name == "mean" else name] = value
    return found


def aggregate(
    job: Job, scores: Sequence[SampleScore], rounds: Rounds | None = None, votes: Votes = NO_VOTES
) -> Report:
    """Return the metrics over scored samples of a job.

    rounds: of a run that stops problems, by whose rule samples are chosen for what is told.
    votes: what samples vote by that their records do not have.
    """
    settings = job.settings
    fixed, num = list(scores), settings.num_samples
    if settings.stop_when != NEVER:
        # Those that were drawn whatever came; see `treegen.evals.asked.stopping`.
        num = settings.first_round
        fixed = [sample for sample in scores if sample.sample_index < num]
    options = ReportOptions(
        problem_ids=[problem.id for problem in job.data.problems],
        num_samples=num,
        num_fewshot=job.data.num_fewshot,
        pass_ks=_up_to(num, settings.pass_ks),
        maj_ks=_up_to(num, settings.maj_ks),
        problems=job.data.problems,
    )
    report = asked(job.task.aggregate, job.task.name)(fixed, options)
    if not isinstance(report, Report):
        name = type(report).__name__
        raise TaskError(f"aggregate of task {job.task.name!r} gives a {name}; it must be a Report")
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


def look_back(job: Job, run: RunDir) -> Rounds | None:
    """Return how far the rounds of a run are by what it has stored; None if it has no rounds.

    It also tells the run which samples need not be drawn.
    """
    settings = job.settings
    if not settings.in_rounds:
        return None
    problems = {problem.id: problem for problem in job.data.problems}
    kind = answer_types(job.task).get(job.task.filters[0])
    rounds = Rounds(settings.stop_rule, list(problems), kind.representatives if kind else None)
    for record in run.records():
        verdicts: Mapping[str, Verdict] = {}
        if rounds.reads_answers:
            verdicts = verdicts_on(job.task, problems[record["problem_id"]], record)
        first = verdicts.get(job.task.filters[0])
        rounds.add(record, first.answer if first else None)
    rounds.due()
    run.spared = rounds.spared
    return rounds
