"""Judging of runs, from settings to stored judgements: the work of `treegen judge`.

Judge models are checked before any judging starts, and loaded one at a time.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.lifetimes import Closeable
from treegen.errors import InputError, arg
from treegen.evals.identity import load_stored_job
from treegen.evals.job import Job
from treegen.evals.judging.judgement_files import (
    begin,
    get_slot,
    open_judgements,
    read_records,
    read_verdict,
)
from treegen.evals.judging.judgements import JudgementSet, group_juries, read_judged
from treegen.evals.judging.prompts import AnswerSet, cases_of
from treegen.evals.judging.repeats import RepeatScheduler, is_settled
from treegen.evals.judging.runner import JudgeUsage, run_judge
from treegen.evals.judging.settings import JudgeRun, JudgeSettings
from treegen.evals.model import check_machine, weights_fingerprint
from treegen.evals.pipeline.execution import ModelLoader
from treegen.evals.pipeline.listener import Follow, Listener
from treegen.model.options import EngineOptions, check_known
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model to judge with."""

    engine: EngineOptions
    """The options with which it is or would be loaded."""
    fingerprint: str
    """A hash of its weights."""
    llm: "BaseLLM | None" = None
    """The model, if the caller has loaded it and keeps it open."""


def resolve_judges(
    judges: "Sequence[str | BaseLLM]", options: Mapping[str, Any]
) -> list[JudgeModel]:
    """Return the judges, checked as far as possible without loading weights.

    Args:
        judges: Directories or names of models, or loaded models.
        options: Options for loading models, by the names of `EngineOptions`.

    Raises:
        InputError: an option is wrong, or two judges have the same weights.
        ModelError: there is no such model.
    """
    if not isinstance(options, Mapping):
        raise InputError(f"options must be a mapping of names to values, got {options!r:.60}")
    check_known(options, "options")
    resolved: list[JudgeModel] = []
    for name_or_llm in judges:
        if isinstance(name_or_llm, str):
            engine = EngineOptions(model=name_or_llm, **options)
            check_machine(engine)
            judge = JudgeModel(engine, weights_fingerprint(engine))
        else:
            judge = JudgeModel(name_or_llm.model_info.engine, name_or_llm.fingerprint, name_or_llm)
        if any(judge.fingerprint == other.fingerprint for other in resolved):
            raise InputError(f"the judge {judge.engine.model} is named twice; name each judge once")
        resolved.append(judge)
    return resolved


@dataclass(slots=True)
class JudgeLoader(Closeable):
    """Loads judges when they are needed; a judge stays loaded until another one is requested."""

    sampler: ModelLoader | None = None
    """The model that has drawn the samples, if it is still loaded. It is reused if it is also the
    judge; otherwise it is closed before a judge is loaded."""
    _loader: ModelLoader = field(default_factory=ModelLoader, init=False)

    def get(self, judge: JudgeModel, listener: Listener) -> "BaseLLM":
        """Return the loaded model of a judge.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if judge.llm is not None:
            return judge.llm
        if self.sampler is not None:
            if (llm := self.sampler.get_loaded(judge.engine, judge.fingerprint)) is not None:
                return llm
            self.sampler.close()
        return self._loader.load(judge.engine, judge.fingerprint, listener)

    def close(self) -> None:
        """Close the judge that was loaded here, and free its memory."""
        self._loader.close()


@dataclass(slots=True)
class JudgeResult:
    """The result of judging a run."""

    judged: list[JudgementSet]
    """The judge runs, one for each judge that has started."""
    answers: AnswerSet
    """The judged answers."""
    done: int = 0
    """Number of judgements that are stored."""
    planned: int = 0
    """Number of judgements that are stored once judging is done."""
    work: dict[str, JudgeUsage] = field(default_factory=dict)
    """What each judge computed in this call, by the name of the judge run."""


@dataclass(frozen=True)
class OpenRuns:
    """Runs whose answers are judged, open for reading; the first one stores the judgements."""

    runs: tuple[RunDir, ...]
    jobs: tuple[Job, ...]
    answers: AnswerSet


def open_runs(paths: Sequence[Path], choices: Mapping[str, Any], stack: ExitStack) -> OpenRuns:
    """Open runs of the same problems, and read their answers.

    Args:
        paths: Directories of the runs. The first run stores the judgements.
        choices: Where the problems are now, and whether task code may run; see `OpenRunOptions`.
        stack: Closes the runs.

    Raises:
        RunError: a directory has no run, or a run is corrupt.
        InputError: the problems cannot be read, or differ between runs, or a run is named twice.
    """
    real = [path.resolve() for path in paths]
    if len(set(real)) < len(real):
        raise InputError(f"{arg('pairs=')} names a run twice; name different runs")
    runs = tuple(stack.enter_context(RunDir.open(path)) for path in paths)
    jobs = tuple(load_stored_job(choices, run) for run in runs)
    return OpenRuns(runs, jobs, AnswerSet(jobs, runs))


def judge_all(
    open_runs: OpenRuns,
    judges: Sequence[JudgeModel],
    models: JudgeLoader,
    settings: JudgeSettings,
    follow: Follow,
    listener: Listener,
) -> JudgeResult:
    """Judge the answers of runs by one judge after another; stored judgements are not repeated.

    Args:
        open_runs: The open runs.
        judges: The judges, from `resolve_judges`.
        models: Loads a judge if any of its judgements is missing.
        settings: Settings of judging.
        follow: Runs the steps of a judge, and shows their progress.
        listener: Receives warnings.

    Raises:
        InputError: the rubric does not fit these runs.
        TreegenError: a judge cannot be loaded or run, or the folder of the run cannot be written.
    """
    rubric = settings.rubric
    if rubric.pairs != (len(open_runs.runs) > 1):
        raise InputError(
            f"the rubric {rubric.name} compares pairs of answers; pass another run with "
            f"{arg('pairs=')}"
            if rubric.pairs
            else f"{arg('pairs=')} requires a rubric that compares pairs, but {rubric.name} "
            f"does not; use {arg('rubric', 'pairwise')}, or add `pairs: true` to the "
            "file of the rubric"
        )
    _check_references(settings, open_runs.answers)
    for notice in settings.rubric.describe_misplaced(settings.wordings):
        listener.warn(notice)
    result = JudgeResult([], open_runs.answers)
    names = []
    for judge in judges:
        judging = begin(
            open_runs.runs[0], open_runs.runs[1:], judge.engine.model, judge.fingerprint, settings
        )
        names.append(judging.name)
        with ExitStack() as stack:
            lines = stack.enter_context(open_judgements(open_runs.runs[0].path, judging))
            for notice in lines.notices:
                listener.warn(notice)
            scheduler = RepeatScheduler(settings, cases_of(open_runs.answers, judging), lines)
            work = result.work[judging.name] = JudgeUsage()
            done, planned = scheduler.done, scheduler.planned
            if scheduler.num_missing:
                llm = models.get(judge, listener)
                steps = partial(run_judge, judging, open_runs.answers, lines, llm, work)
                done, planned = follow(steps, "judgements")
            result.done, result.planned = result.done + done, result.planned + planned
            if done < planned:
                break
    by_name = {judge.judging.name: judge for judge in read_judged(open_runs.runs[0].path)}
    result.judged = [by_name[name] for name in names if name in by_name]
    return result


def load_juries(path: Path) -> list[list[JudgementSet]]:
    """Return the judge runs of a run, grouped into juries; this loads no model."""
    return [group for group in group_juries(read_judged(path)) if any(g.judgements for g in group)]


def progress_of(
    path: Path, judging: JudgeRun, samples: Iterable[tuple[str, int]]
) -> tuple[int, int]:
    """Return the numbers of stored and of planned judgements of a stored judge run.

    Args:
        path: Directory of the run.
        judging: The judge run; it must judge answers of that run only.
        samples: (problem, index) of each sample of the run.
    """
    settings, sample_keys = judging.settings, set(samples)
    num_criteria = max(1, len(settings.rubric.criteria))
    done, planned = 0, len(sample_keys) * settings.wordings * num_criteria * settings.repeats
    verdict_of_repeat: dict[Hashable, dict[int, str | None]] = defaultdict(dict)
    for record in read_records(path, judging.name):
        answer_keys, wording, criterion, repeat = get_slot(record)
        is_planned = (
            wording < settings.wordings and criterion < num_criteria and repeat < settings.repeats
        )
        if (
            is_planned
            and len(answer_keys) == 1
            and (record["problem_id"], answer_keys[0][1]) in sample_keys
        ):
            verdict = read_verdict(record, settings.rubric) if settings.decided else None
            verdict_of_repeat[record["problem_id"], answer_keys, wording, criterion][repeat] = (
                verdict
            )
    for verdicts in verdict_of_repeat.values():
        remaining = settings.repeats - len(verdicts)
        done += len(verdicts)
        if settings.decided and is_settled(verdicts.values(), remaining):
            planned -= remaining
    return done, planned


def _check_references(settings: JudgeSettings, answers: AnswerSet) -> None:
    """Raise InputError if a built-in rubric needs references and a problem has none."""
    lacking = [problem for problem, text in answers.references.items() if not text]
    if lacking and settings.rubric.name in ("correctness", "simpleqa"):
        raise InputError(
            f"the rubric {settings.rubric.name} requires references, but {len(lacking):,} "
            f"problems have no reference, such as {lacking[0]!r}; use "
            f"{arg('rubric', 'rating')}, or write another rubric"
        )
