"""Scoring of the samples of a run, and aggregation of the scores into a report.

Nothing here imports torch, because scoring a stored run needs no model.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.verdict_cache import VerdictCache, hash_content
from treegen.evals.scoring.vote_tables import NO_VOTES, VoteInputs, stop_tables, vote_table
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.weighted import read_numbers
from treegen.evals.task import Task
from treegen.evals.task_calls import score_record, wrap_task_method
from treegen.evals.thinking import load_thinking
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs import RunDir

_AS_READ: Final = " as read"  # marks the verdicts in the cache that are not unified
_NO_VERDICTS: Final[Mapping[str, Verdict]] = MappingProxyType({})


class RunVerdicts:
    """The verdicts on the samples of a run; each sample is scored once.

    A stored sample is scored when it is first read, and a new one when it is stored. The verdicts
    are in the order of the records, and hold as long as the hash of these lines is the same.
    """

    def __init__(self, job: Job, *, cache_all: bool = False) -> None:
        """Start without verdicts.

        Args:
            job: The job of the run.
            cache_all: Whether `VerdictCache` also keeps verdicts of small and unfinished runs, so
                that a run that is resumed scores its new samples only.
        """
        self._job, self._cache_all = job, cache_all
        self._problems = {problem.id: problem for problem in job.data.problems}
        self._types = job.task.answer_types
        self._interner = _VerdictInterner()
        self._digest = hashlib.sha256()  # of the lines of the samples that have verdicts
        self._verdicts: list[Mapping[str, Verdict] | None] = []  # None: scoring failed
        self._unified: list[Mapping[str, Verdict]] = []
        self._of_choices: dict[tuple[str, str], Mapping[str, Verdict]] = {}

    def append(self, run: RunDir, record: dict[str, Any]) -> Mapping[str, Verdict]:
        """Store a new sample in the run and return its verdicts, as the task gives them.

        Args:
            run: The run. Its stored samples have been read by `read_stored`.
            record: The sample.
        """
        run.append(record, self._digest)
        self._verdicts.append(None)
        problem = self._problems[record["problem_id"]]
        verdicts = self._intern(problem.id, score_record(self._job.task, problem, record))
        self._verdicts[-1] = verdicts
        return verdicts

    def read_stored(
        self, run: RunDir, *, anew: bool = False
    ) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict]]]:
        """Yield every stored sample with its verdicts, as the task gives them.

        Args:
            run: The run.
            anew: Whether to score all samples, including those that have verdicts.

        Raises:
            RunError: a record is damaged, or the file changed while it was read.
        """
        for record, verdicts, _ in self._read(run, anew=anew):
            yield record, verdicts

    def _read(
        self, run: RunDir, *, anew: bool, unify: bool = False, cache: VerdictCache | None = None
    ) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict], Mapping[str, Verdict]]]:
        """Yield every stored sample with its verdicts, and with those that are unified at the end.

        Args:
            run: The run.
            anew: As for `stored`.
            unify: Whether to unify answers; otherwise both verdicts are the same.
            cache: Receives the unified verdicts.
        """
        # Equal verdicts on samples of a problem are one object; by its id, its problem and copy.
        copies: dict[int, tuple[str, dict[str, Verdict]]] = {}
        has_copies = unify and bool(self._types)
        earlier, expected = ([], "") if anew else self._earlier_verdicts(run)
        digest, scored = hashlib.sha256(), list[Mapping[str, Verdict] | None]()
        for number, record in enumerate(run.records(digest)):
            verdicts = earlier[number] if number < len(earlier) else None
            if verdicts is None:  # without a call of `_intern`, because runs have many samples
                problem = self._problems[record["problem_id"]]
                verdicts = self._interner(
                    problem.id if self._types else "",
                    score_record(self._job.task, problem, record),
                )
            mine = verdicts
            if has_copies:
                fresh = record["problem_id"], dict(verdicts)
                mine = copies.setdefault(id(verdicts), fresh)[1]
            scored.append(verdicts)
            yield record, verdicts, mine
        _check_unchanged(run, digest.hexdigest(), expected)
        self._digest, self._verdicts = digest, scored
        if not unify:
            return
        self._unified = [verdicts for verdicts in scored if verdicts is not None]
        if has_copies:
            answers = wrap_task_method(unify_answers, self._job.task.name)(
                list(copies.values()), self._types
            )
            for (_, mine), changed in zip(copies.values(), answers, strict=True):
                mine.update(changed)
            self._unified = [copies[id(verdicts)][1] for verdicts in self._unified]
        if cache is not None:
            cache.write(digest.hexdigest(), self._unified)

    def read_unified(
        self, run: RunDir, *, anew: bool = False
    ) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict], Mapping[str, Verdict]]]:
        """Yield every stored sample with its verdicts, as the task gives them and as reports do.

        In the latter, equal answers of a problem are equal strings if the task declares answer
        types. They become so only at the end of the iteration.

        Args:
            run: The run.
            anew: As for `read_stored`.

        Raises:
            RunError: as for `read_stored`.
        """
        # Early stopping needs answers that are not unified, unlike those in this cache.
        complete = run.missing <= 0 and not self._job.settings.in_rounds
        cache = VerdictCache.of(self._job, run, any_run=self._cache_all) if complete else None
        digest, unified = "", list[Mapping[str, Verdict]]()
        if not anew and (self._unified or (cache and not cache.is_empty)):
            digest = run.digest()
            if self._unified and self._digest.hexdigest() == digest:
                unified = self._unified
            elif cache is not None:
                unified = list(filter(None, cache.read(digest) or ()))
        if not unified:
            return self._read(run, anew=anew, unify=True, cache=cache)
        raw = list(filter(None, self._verdicts)) if unified is self._unified else unified
        return _read_with(run, raw, unified, digest)

    def save(self, run: RunDir) -> None:
        """Cache the verdicts on an unfinished run, for the call that resumes it."""
        cache = VerdictCache.of(self._job, run, any_run=self._cache_all)
        if cache is not None and self._verdicts:
            cache.write(f"{self._digest.hexdigest()}{_AS_READ}", self._verdicts)

    def of_length_normalized(
        self, record: Mapping[str, Any], verdicts: Mapping[str, Verdict]
    ) -> Mapping[str, Verdict]:
        """Return the verdicts on the choice with the highest log-probability per character.

        Args:
            record: The sample; without choices the result is empty.
            verdicts: The verdicts on the sample, which is the likeliest choice.
        """
        if "choice_logprobs" not in record or self._job.data.scored:
            return _NO_VERDICTS
        problem, task = self._problems[record["problem_id"]], self._job.task
        choice = pick_length_normalized(problem, record["choice_logprobs"])
        if choice == record["text"] and type(task).verdicts is Task.verdicts:
            return verdicts
        if (problem.id, choice) not in self._of_choices:
            self._of_choices[problem.id, choice] = task.score(problem, choice)
        return self._of_choices[problem.id, choice]

    def is_for(self, job: Job) -> bool:
        """Return whether the verdicts are those of another job: of the same task and problems."""
        return job is self._job or hash_content(job) == hash_content(self._job)

    def _intern(self, problem_id: str, verdicts: Mapping[str, Verdict]) -> Mapping[str, Verdict]:
        # With answer types, equal verdicts are shared within a problem only, because which answers
        # are equal depends on the other answers of the problem.
        return self._interner(problem_id if self._types else "", verdicts)

    def _earlier_verdicts(self, run: RunDir) -> tuple[list[Mapping[str, Verdict] | None], str]:
        """Return the verdicts on the stored samples that are known, and the hash of these samples.

        The hash is empty if there are none.
        """
        if self._verdicts:
            digest = run.digest()
            is_valid = digest == self._digest.hexdigest()
            return (self._verdicts, digest) if is_valid else ([], "")
        cache = VerdictCache.of(self._job, run, any_run=True) if self._cache_all else None
        if cache is None or cache.is_empty or not run.done:
            return [], ""
        digest = run.digest()
        if (cached := cache.read(f"{digest}{_AS_READ}")) is None:
            return [], ""
        keys = (problem_id for problem_id, _ in run.done)
        return [
            None if verdicts is None else self._intern(problem_id, verdicts)
            for problem_id, verdicts in zip(keys, cached, strict=True)
        ], digest


def _read_with(
    run: RunDir,
    raw: Sequence[Mapping[str, Verdict]],
    unified: Sequence[Mapping[str, Verdict]],
    digest: str,
) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict], Mapping[str, Verdict]]]:
    """Yield every stored sample with its verdicts, which hold for samples with a digest."""
    read = hashlib.sha256()
    # A file that has changed may have another number of samples.
    yield from zip(run.records(read), raw, unified, strict=False)
    _check_unchanged(run, read.hexdigest(), digest)


def _check_unchanged(run: RunDir, digest: str, expected: str) -> None:
    """Raise RunError if samples are not those that verdicts were found for."""
    if expected and digest != expected:
        raise RunError(f"{run.path} was changed while it was read; read it again")


def score_samples(
    job: Job,
    run: RunDir,
    look: Callable[[dict[str, Any], SampleScore | None], None],
    *,
    judging: ProgramScoring | None = None,
    rounds: Rounds | None = None,
    anew: bool = False,
    verdicts: RunVerdicts | None = None,
) -> None:
    """Read every stored sample once, and call `look` with the sample and its score.

    If the task declares answer types, equal answers of a problem become equal strings in the
    scores only when this function returns. Equal verdicts are one object, which saves memory.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        look: Called with each stored sample and its score, which is None for a program that has
            none yet.
        judging: The verdicts on programs; None if samples are not programs.
        rounds: Early stopping; receives each sample too. None without early stopping.
        anew: Whether to score all samples, including those with cached verdicts.
        verdicts: The verdicts that are known; by default those that `VerdictCache` has.

    Raises:
        RunError: a record is damaged, or the file changed while it was read.
    """
    headline = job.task.filters[0]
    problem_ids = {problem.id: problem.id for problem in job.data.problems}
    if verdicts is None or not verdicts.is_for(job):
        verdicts = RunVerdicts(job)
    scored: Iterable[tuple[dict[str, Any], Any, Any]]
    if judging is None:
        scored = verdicts.read_unified(run, anew=anew)
    else:
        scored = ((record, v := judging.verdicts(record), v) for record in run.records())
    for record, raw, mine in scored:
        if rounds is not None:
            _add_sample(rounds, record, raw.get(headline) if raw else None)
        by_length = _NO_VERDICTS
        if mine and "choice_logprobs" in record:
            by_length = verdicts.of_length_normalized(record, mine)
        score = None
        if mine is not None:
            # All scores of a problem share one string as its id.
            score = build_sample_score(problem_ids[record["problem_id"]], record, mine, by_length)
        look(record, score)
    if rounds is not None:
        rounds.take_due()
        run.spared = rounds.spared


class _VerdictInterner:
    """Replaces equal verdicts on samples of a group by one object.

    Attributes:
        distinct: These objects.
    """

    def __init__(self) -> None:
        self.distinct: list[Mapping[str, Verdict]] = []
        self._equal: dict[tuple[object, ...], Mapping[str, Verdict]] = {}
        self._same: dict[tuple[object, ...], Mapping[str, Verdict]] = {}

    def __call__(self, group: str, verdicts: Mapping[str, Verdict]) -> Mapping[str, Verdict]:
        # Many tasks return equal verdicts as one object. `distinct` keeps objects alive, so ids of
        # objects are unique.
        same = (group, *verdicts, *map(id, verdicts.values()))
        if (interned := self._same.get(same)) is not None:
            return interned
        key: tuple[object, ...] = (group, *verdicts.items())
        try:
            interned = self._equal.get(key)
        except TypeError:  # a task's own class may have no hash
            key, interned = (len(self.distinct),), None
        if interned is None:
            interned = self._equal[key] = self._same[same] = dict(verdicts)
            self.distinct.append(interned)
        return interned


def build_sample_score(
    problem_id: str,
    record: Mapping[str, Any],
    verdicts: Mapping[str, Verdict],
    by_length: Mapping[str, Verdict] = _NO_VERDICTS,
) -> SampleScore:
    """Return the score of a stored sample.

    Args:
        problem_id: The problem of the sample.
        record: The stored sample.
        verdicts: The verdicts on the sample, by filter.
        by_length: As in `SampleScore`.
    """
    thinking = load_thinking(record)
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
    place = {problem.id: number for number, problem in enumerate(job.data.problems)}
    groups: list[list[SampleScore]] = [[] for _ in place]
    for score in scores:
        groups[place[score.problem_id]].append(score)
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
    run.spared = rounds.spared
    return rounds


def _add_sample(rounds: Rounds, record: Mapping[str, Any], first: Verdict | None) -> None:
    """Add a stored sample to the rounds.

    Args:
        rounds: The rounds.
        record: The stored sample.
        first: Its verdict by the first filter; None if it has none.
    """
    reads = rounds.reads_answers and first is not None
    rounds.add(record, first.answer if reads and first is not None else None)
