"""The verdicts on the samples of a run; each sample is scored once.

Nothing here imports torch, because scoring a stored run needs no model.
"""

import hashlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from treegen.errors import RunError
from treegen.evals.job import Job
from treegen.evals.multiple_choice import pick_length_normalized
from treegen.evals.scoring.verdict_cache import VerdictCache, hash_content
from treegen.evals.task import Task
from treegen.evals.task_calls import score_record, score_text, wrap_task_method
from treegen.evals.verdict import Verdict, unify_answers
from treegen.runs import RunDir

Verdicts = Mapping[str, Verdict]
"""The verdicts on one sample, by filter."""
ScoredSample = tuple[dict[str, Any], Verdicts, Verdicts]
"""A stored sample, its verdicts as the task gives them, and those in which answers are unified."""
NO_VERDICTS: Final[Verdicts] = MappingProxyType({})
_AS_READ: Final = " as read"  # marks the verdicts in the cache that are not unified


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
        self._verdicts: list[Verdicts | None] = []  # None: scoring failed
        self._unified: list[Verdicts] = []
        self._of_choices: dict[tuple[str, str], Verdicts] = {}

    def append(self, run: RunDir, record: dict[str, Any]) -> Verdicts:
        """Store a new sample in the run and return its verdicts, as the task gives them.

        Args:
            run: The run. Its stored samples have been read by `read_stored`.
            record: The sample.
        """
        run.append(record, self._digest)
        self._verdicts.append(None)
        self._unified = []
        problem = self._problems[record["problem_id"]]
        verdicts = self._intern(problem.id, score_record(self._job.task, problem, record))
        self._verdicts[-1] = verdicts
        return verdicts

    def read_stored(self, run: RunDir) -> Iterator[tuple[dict[str, Any], Verdicts]]:
        """Yield every stored sample with its verdicts, as the task gives them.

        Raises:
            RunError: a record is corrupt, or the file changed while it was read.
        """
        for record, verdicts, _ in self._read(run):
            yield record, verdicts

    def _read(
        self,
        run: RunDir,
        *,
        rescore: bool = False,
        unify: bool = False,
        cache: VerdictCache | None = None,
    ) -> Iterator[ScoredSample]:
        """Yield every stored sample with its verdicts, and with those that are unified at the end.

        Args:
            run: The run.
            rescore: Whether to score all samples, including those that have verdicts.
            unify: Whether to unify answers; otherwise both verdicts are the same.
            cache: Receives the unified verdicts.
        """
        # Equal verdicts on samples of a problem are one object; by its id, its problem and copy.
        copies: dict[int, tuple[str, dict[str, Verdict]]] = {}
        has_copies = unify and bool(self._types)
        earlier, expected = ([], "") if rescore else self._earlier_verdicts(run)
        digest, scored = hashlib.sha256(), list[Verdicts | None]()
        for number, record in enumerate(run.records(digest)):
            verdicts = earlier[number] if number < len(earlier) else None
            if verdicts is None:  # without a call of `_intern`, because runs have many samples
                problem = self._problems[record["problem_id"]]
                verdicts = self._interner(
                    problem.id if self._types else "", score_record(self._job.task, problem, record)
                )
            own_copy = verdicts
            if has_copies:
                fresh = record["problem_id"], dict(verdicts)
                own_copy = copies.setdefault(id(verdicts), fresh)[1]
            scored.append(verdicts)
            yield record, verdicts, own_copy
        _check_unchanged(run, digest.hexdigest(), expected)
        self._digest, self._verdicts = digest, scored
        if not unify:
            return
        self._unified = [verdicts for verdicts in scored if verdicts is not None]
        if has_copies:
            answers = wrap_task_method(unify_answers, self._job.task.name)(
                list(copies.values()), self._types
            )
            for (_, own_copy), changed in zip(copies.values(), answers, strict=True):
                own_copy.update(changed)
            self._unified = [copies[id(verdicts)][1] for verdicts in self._unified]
        if cache is not None:
            cache.write(digest.hexdigest(), self._unified)

    def read_unified(self, run: RunDir, *, rescore: bool = False) -> Iterator[ScoredSample]:
        """Yield every stored sample with its verdicts, as the task gives them and as reports do.

        In the latter, equal answers of a problem are equal strings if the task declares answer
        types. They become so only at the end of the iteration.

        Args:
            run: The run.
            rescore: Whether to score all samples, including those that have verdicts.

        Raises:
            RunError: as for `read_stored`.
        """
        # Early stopping needs answers that are not unified, unlike those in this cache.
        complete = run.missing <= 0 and not self._job.settings.in_rounds
        cache = VerdictCache.of(self._job, run, any_run=self._cache_all) if complete else None
        digest, unified = "", list[Verdicts]()
        if not rescore and (self._unified or (cache and not cache.is_empty)):
            digest = run.digest()
            if self._unified and self._digest.hexdigest() == digest:
                unified = self._unified
            elif cache is not None:
                unified = list(filter(None, cache.read(digest) or ()))
        if not unified:
            return self._read(run, rescore=rescore, unify=True, cache=cache)
        raw = list(filter(None, self._verdicts)) if unified is self._unified else unified
        return _read_with(run, raw, unified, digest)

    def save(self, run: RunDir) -> None:
        """Cache the verdicts on an unfinished run, for the call that resumes it."""
        cache = VerdictCache.of(self._job, run, any_run=self._cache_all)
        if cache is not None and self._verdicts:
            cache.write(f"{self._digest.hexdigest()}{_AS_READ}", self._verdicts)

    def of_length_normalized(self, record: Mapping[str, Any], verdicts: Verdicts) -> Verdicts:
        """Return the verdicts on the choice with the highest log-probability per character.

        Args:
            record: The sample; without choices the result is empty.
            verdicts: The verdicts on the sample, which is the most likely choice.
        """
        if "choice_logprobs" not in record or self._job.data.scored:
            return NO_VERDICTS
        problem, task = self._problems[record["problem_id"]], self._job.task
        choice = pick_length_normalized(problem, record["choice_logprobs"])
        if choice == record["text"] and type(task).verdicts is Task.verdicts:
            return verdicts
        if (problem.id, choice) not in self._of_choices:
            self._of_choices[problem.id, choice] = score_text(task, problem, choice)
        return self._of_choices[problem.id, choice]

    def is_for(self, job: Job) -> bool:
        """Return whether these verdicts are valid for a job: its task and problems are the same."""
        return job is self._job or hash_content(job) == hash_content(self._job)

    def _intern(self, problem_id: str, verdicts: Verdicts) -> Verdicts:
        # With answer types, equal verdicts are shared within a problem only, because which answers
        # are equal depends on the other answers of the problem.
        return self._interner(problem_id if self._types else "", verdicts)

    def _earlier_verdicts(self, run: RunDir) -> tuple[list[Verdicts | None], str]:
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
    run: RunDir, raw: list[Verdicts], unified: list[Verdicts], digest: str
) -> Iterator[ScoredSample]:
    """Yield every stored sample with its verdicts, which hold for samples with a digest."""
    read = hashlib.sha256()
    # A file that has changed may have another number of samples.
    yield from zip(run.records(read), raw, unified, strict=False)
    _check_unchanged(run, read.hexdigest(), digest)


def _check_unchanged(run: RunDir, digest: str, expected: str) -> None:
    """Raise RunError if samples are not those that verdicts were found for."""
    if expected and digest != expected:
        raise RunError(
            f"the run {run.path} was changed while treegen read the run; read the run again"
        )


class _VerdictInterner:
    """Replaces equal verdicts on samples of a group by one object.

    Attributes:
        distinct: These objects.
    """

    def __init__(self) -> None:
        self.distinct: list[Verdicts] = []
        self._equal: dict[tuple[object, ...], Verdicts] = {}
        self._same: dict[tuple[object, ...], Verdicts] = {}

    def __call__(self, group: str, verdicts: Verdicts) -> Verdicts:
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
