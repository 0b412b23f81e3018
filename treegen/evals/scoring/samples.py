"""Scoring of the samples of a run, and aggregation of the scores into a report.

Nothing here imports torch, because scoring a stored run needs no model.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from treegen.errors import RunError, TaskError
from treegen.evals.answer_types import unify_answers
from treegen.evals.config.early_stopping import NEVER, Rounds
from treegen.evals.job import Job
from treegen.evals.multiple_choice import pick_length_normalized
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.verdict_cache import VerdictCache
from treegen.evals.scoring.vote_tables import NO_VOTES, VoteInputs, stop_tables, vote_table
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task_calls import score_record, wrap_task_method
from treegen.evals.thinking import load_thinking
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs import RunDir

_NO_VERDICTS: Final[Mapping[str, Verdict]] = MappingProxyType({})


def score_samples(
    job: Job,
    run: RunDir,
    look: Callable[[dict[str, Any], Mapping[str, Verdict] | None], None],
    *,
    judging: ProgramScoring | None = None,
    rounds: Rounds | None = None,
    anew: bool = False,
) -> None:
    """Read every stored sample once, and call `look` with the sample and its verdicts.

    If the task declares answer types, equal answers of a problem become equal strings in the
    verdicts only when this function returns. Equal verdicts are one object, which saves memory.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        look: Called with each stored sample and its verdicts by filter. The verdicts are None for
            a program that has none yet.
        judging: The verdicts on programs; None if samples are not programs.
        rounds: Early stopping; receives each sample too. None without early stopping.
        anew: Whether to score all samples, including those with cached verdicts; see
            `VerdictCache`.

    Raises:
        RunError: a record is damaged, or the file changed while it was read.
    """
    problems = {problem.id: problem for problem in job.data.problems}
    headline = job.task.filters[0]
    types = {} if judging else job.task.answer_types
    once = _VerdictInterner()
    # Rounds need answers as the task reads them, before equal answers become equal strings, which
    # cached verdicts do not have.
    kept = None if judging or rounds else VerdictCache.of(job, run)
    digest = run.digest() if kept and not anew and not kept.is_empty else ""
    known = kept.read(digest) if kept and digest else None
    read = hashlib.sha256()
    scored: list[Mapping[str, Verdict]] = []
    for number, record in enumerate(run.records(read if kept else None)):
        problem = problems[record["problem_id"]]
        verdicts: Mapping[str, Verdict] | None
        if judging:
            verdicts = judging.verdicts(record)
        elif known is not None:
            verdicts = known[number] if number < len(known) else None
        else:
            # With answer types, equal verdicts are shared within a problem only, because which
            # answers are equal depends on the other answers of the problem.
            verdicts = once(problem.id if types else "", score_record(job.task, problem, record))
            scored.append(verdicts)
        if rounds is not None:
            _tell(rounds, record, verdicts.get(headline) if verdicts else None)
        look(record, verdicts)
    if rounds is not None:
        rounds.take_due()
        run.spared = rounds.spared
    if types:
        settled = wrap_task_method(unify_answers, job.task.name)(once.found, types)
        for (_, mine), verdicts in zip(once.found, settled, strict=True):
            mine.update(verdicts)
    if kept and known is None:
        kept.write(read.hexdigest(), scored)
    elif kept and read.hexdigest() != digest:
        raise RunError(f"{run.path} was changed while it was read; read it again")


class _VerdictInterner:
    """Replaces equal verdicts on samples of a group by one object.

    found: (group, verdicts) of each distinct object.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Verdict]]] = []
        self._known: dict[tuple[object, ...], dict[str, Verdict]] = {}
        self._same: dict[tuple[object, ...], dict[str, Verdict]] = {}

    def __call__(self, group: str, verdicts: Mapping[str, Verdict]) -> Mapping[str, Verdict]:
        # Many tasks return equal verdicts as one object. `found` keeps objects alive, so ids of
        # objects are unique.
        same = (group, *verdicts, *map(id, verdicts.values()))
        if (found := self._same.get(same)) is not None:
            return found
        key: tuple[object, ...] = (group, *verdicts.items())
        try:
            known = self._known.get(key)
        except TypeError:  # a task's own class may have no hash
            key, known = (len(self.found),), None
        if known is None:
            known = self._known[key] = self._same[same] = dict(verdicts)
            self.found.append((group, known))
        return known


def build_sample_score(
    job: Job, problem: Problem, record: Mapping[str, Any], verdicts: Mapping[str, Verdict]
) -> SampleScore:
    """Return the score of a stored sample.

    Args:
        job: The job of the run.
        problem: The problem of the sample.
        record: The stored sample.
        verdicts: The verdicts on the sample, by filter.
    """
    thinking = load_thinking(record)
    by_length = _NO_VERDICTS
    if "choice_logprobs" in record and not job.data.scored:
        choice = pick_length_normalized(problem, record["choice_logprobs"])
        by_length = job.task.score(problem, choice)
    num_tokens = record["num_tokens"]
    return SampleScore(  # positional arguments, because they are faster than keywords
        problem.id,
        record["sample_index"],
        sys.intern(record["finish_reason"] or ""),
        verdicts,
        by_length,
        _numbers(record, num_tokens),
        num_tokens,
        None if thinking is None else thinking.is_closed,
    )


def _numbers(record: Mapping[str, Any], num_tokens: int) -> dict[str, float]:
    """Return the numbers of a stored sample that votes may use as weights, by name."""
    numbers = {}
    if num_tokens and (logprob := record.get("logprob")) is not None:
        numbers["logprob"] = logprob / num_tokens
    if (certainty := record.get("self_certainty")) is not None:
        numbers["certainty"] = certainty
    if confidence := record.get("confidence"):
        for name, value in confidence.items():
            numbers["confidence" if name == "mean" else name] = value
    return numbers


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
    place = {problem.id: number for number, problem in enumerate(job.data.problems)}
    groups: list[list[SampleScore]] = [[] for _ in place]
    for each in scores:
        groups[place[each.problem_id]].append(each)
    for group in groups:
        group.sort(key=attrgetter("sample_index"))
    scores = list(chain.from_iterable(groups))
    fixed, num = scores, settings.num_samples
    if settings.stop_when != NEVER:
        # Only samples that are drawn before any stop; see `treegen.evals.config.early_stopping`.
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
    report = wrap_task_method(job.task.aggregate, job.task.name)(fixed, options)
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


def rounds_of(job: Job) -> Rounds | None:
    """Create the sampling rounds of a job, before any sample; None without early stopping."""
    if not job.settings.in_rounds:
        return None
    kind = job.task.answer_types.get(job.task.filters[0])
    ids = [problem.id for problem in job.data.problems]
    return Rounds(job.settings.stop_rule, ids, kind.representatives if kind else None)


def restore_rounds(job: Job, run: RunDir) -> Rounds | None:
    """Return the rounds of a run after its stored samples; None without early stopping.

    This also sets how many samples of the run need not be drawn.
    """
    rounds = rounds_of(job)
    if rounds is None:
        return None
    problems = {problem.id: problem for problem in job.data.problems}
    for record in run.records():
        verdicts: Mapping[str, Verdict] = {}
        if rounds.reads_answers:
            verdicts = score_record(job.task, problems[record["problem_id"]], record)
        _tell(rounds, record, verdicts.get(job.task.filters[0]))
    rounds.take_due()
    run.spared = rounds.spared
    return rounds


def _tell(rounds: Rounds, record: Mapping[str, Any], first: Verdict | None) -> None:
    """Add a stored sample to the rounds.

    Args:
        rounds: The rounds.
        record: The stored sample.
        first: Its verdict by the first filter; None if it has none.
    """
    reads = rounds.reads_answers and first is not None
    rounds.add(record, first.answer if reads and first is not None else None)
