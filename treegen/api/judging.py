"""Judge runs from Python: `judge`, `judgings` and the result of judging."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.checks import check_int
from treegen.common.files import as_path
from treegen.common.progress import load_tqdm
from treegen.errors import InputError, arg
from treegen.evals.judging.judgements import JudgementSet, labels_of
from treegen.evals.judging.jury import check_jury
from treegen.evals.judging.pipeline import (
    JudgeLoader,
    JudgeResult,
    OpenRuns,
    judge_all,
    load_juries,
    open_runs,
    resolve_judges,
)
from treegen.evals.judging.prompts import AnswerSet
from treegen.evals.judging.rubric import Rubric, load_rubric
from treegen.evals.judging.settings import JudgeRun, Verdicts, resolve_judge_settings
from treegen.evals.judging.summary import Combine, Summary, summarize
from treegen.evals.pipeline.listener import BarListener, Follow, Listener, Stop
from treegen.evals.statistics.tables import Table
from treegen.report.load import (
    JudgingProgress,
    build_flagged_table,
    count_judgements,
    describe_missing,
    describe_missing_samples,
)
from treegen.report.run_settings import NO_SETTING, KeySettings, differing_settings
from treegen.report.tables import PrintableTable, table_listing

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM
    from treegen.report.frames import Frames

_WITHOUT_LABELS: Final = (
    "These numbers are for the uncorrected mean and do not consider the labels. More labelled "
    "problems narrow the interval of the corrected mean."
)


@dataclass(frozen=True, repr=False)
class Judgings:
    """The judgements of a run's samples by models. In a notebook it shows its tables."""

    path: Path
    """The directory of the run."""
    summaries: tuple[Summary, ...]
    """One for each rubric and each way in which it was used; its judges are one jury."""
    flagged: Table | None = None
    """Answers of the run that seem to address their judge; None if there are none."""
    done: int = 0
    """Number of judgements that the call that returned this object made, or that are stored."""
    planned: int = 0
    """The value of `done` once judging is complete."""
    work: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The tokens that the call computed, by judge run."""
    about: tuple[str, ...] = ()
    """Lines that say what the run is, and how the runs of its pairs differ from it."""
    unfinished: tuple[JudgeRun, ...] = ()
    """The stored judge runs with missing judgements; empty if the call made judgements."""

    def describe_missing(self) -> list[str]:
        """Return sentences on missing judgements."""
        progress = JudgingProgress(self.done, self.planned, self.unfinished)
        return describe_missing(self.path, progress)

    def tables(self) -> list[PrintableTable]:
        """Return the tables; each prints as Markdown, and a notebook shows it."""
        tables = [table for summary in self.summaries for table in summary.tables]
        return [table_listing(table) for table in (*tables, self.flagged) if table is not None]

    def needs(self, half_width: float) -> list[PrintableTable]:
        """Return tables of how many problems, answers, judges and so on narrow the interval.

        Args:
            half_width: The wanted distance from the mean to either end of the interval.

        Raises:
            InputError: no verdict can be read.
        """
        head = ["Number of", "Now", "Needed"]
        return [
            PrintableTable(
                head,
                [
                    [
                        number.name,
                        f"{number.present:g}",
                        number.reason if number.required is None else f"{number.required:,}",
                    ]
                    for number in summary.needs(half_width)
                ],
                (1, 2),
                f"{summary.title}: needed for a mean +- {half_width:g} if the other numbers stay",
                lines=() if summary.corrected is None else (_WITHOUT_LABELS,),
            )
            for summary in self.summaries
        ]

    def needs_json(self, half_width: float) -> list[list[dict[str, Any]]]:
        """Return the content of `needs` as plain dicts and lists."""
        return [[asdict(each) for each in summary.needs(half_width)] for summary in self.summaries]

    def to_json(self) -> dict[str, Any]:
        """Return the judgements as plain dicts and lists."""
        return {
            "summaries": [summary.to_json() for summary in self.summaries],
            "flagged": None if self.flagged is None else asdict(self.flagged),
            "done": self.done,
            "planned": self.planned,
            "work": {name: dict(work) for name, work in self.work.items()},
        }

    def __str__(self) -> str:
        about = ["\n".join(self.about)] if self.about else []
        return "\n\n".join((*about, *map(str, self.tables()))) + "\n"

    def __repr__(self) -> str:
        return f"Judgings({str(self.path)!r}): {self.done:,} of {self.planned:,} judgements"

    def _repr_html_(self) -> str:
        about = "".join(f"<p>{escape(line)}</p>" for line in self.about)
        return about + "".join(table._repr_html_() for table in self.tables())


def judge(  # noqa: PLR0913 -- users name these settings of a judgement
    run: "Frames | str | Path",
    rubric: "str | Path | Mapping[str, Any] | Rubric | None" = None,
    judge: "str | BaseLLM | Sequence[str | BaseLLM]" = (),
    *,
    wordings: int | None = None,
    repeats: int | None = None,
    verdicts: Verdicts | None = None,
    stop_when: str | None = None,
    pairs: Sequence[str | Path] = (),
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    chat: bool | None = None,
    labels: str | Path | None = None,
    weights: Sequence[float] | None = None,
    combine: Combine = "mean",
    progress: bool = True,
    options: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    follow: Follow | None = None,
    models: JudgeLoader | None = None,
    **reading: Any,
) -> Judgings:
    """Have models judge the samples of a run and return the judgements, as `treegen judge` does.

    Each judgement is stored as it is made; the same call continues after an interruption.

    Args:
        run: A finished run, or one in progress, by directory or as `evaluate` returns it.
        rubric: "correctness", "rating", "pairwise", "simpleqa", a file, or a mapping with the
            content of such a file. Default: the rubric of the run's task, or correctness; pairwise
            if there are pairs.
        judge: A model by directory or hub name, "demo", an LLM, or several, which are a jury.
        wordings: How many wordings of the rubric to use; None for all.
        repeats: The number of sampled verdicts for each wording and answer. Default: 1.
        verdicts: "likelihood" takes the expected value over the choices; "samples" draws texts with
            reasons. None is samples with repeats, and likelihood without.
        stop_when: "decided" draws no further repeats once the majority of all of them is settled.
        pairs: Directories of further runs of the same problems; answers are compared in both
            orders.
        temperature: Sampling temperature of verdicts by samples. Default: 1.
        max_tokens: The largest number of tokens of a sampled verdict. Default: 512.
        seed: The seed of sampled verdicts. Default: 0.
        chat: Whether prompts are in the judge's chat format; None uses it if the judge has one.
        labels: A JSONL file of people's labels, which correct the mean.
        weights: One positive weight per judge of a jury; None weights all equally.
        combine: How a jury's value is computed from its judges' values: "mean" or "majority".
        progress: Whether to draw a bar and print notices to stderr.
        options: How models are loaded, by the names of LLM's arguments.
        listener: Receives notices and handles Ctrl-C. Default: prints notices, if `progress`.
        follow: Consumes the steps and shows their progress. Default: a bar, if `progress`.
        models: Keeps a judge loaded for further calls.
        reading: data=, task= and allow_task_code=, as for `open_run`.

    Raises:
        InputError: an argument cannot be used.
        TreegenError: as for the run, the model, and the folder of the run.
    """
    judges = _read_judges(judge, pairs)
    weights = check_jury(len(judges), weights, combine)
    if repeats is not None:
        check_int("repeats", repeats)
    _check_listeners(listener, follow, models)
    if stop_when not in (None, "decided"):
        raise InputError(f"{arg('stop_when')} must be 'decided' or None, got {stop_when!r}")
    given_rubric = None if rubric is None else load_rubric(rubric)
    listener = listener or (BarListener() if progress else Listener())
    follow = follow or _following(listener, progress)
    path = _path(run)
    with ExitStack() as stack:
        runs = open_runs([path, *(as_path("pairs", pair) for pair in pairs)], reading, stack)
        task_rubric = runs.jobs[0].task.rubric
        judge_rubric = given_rubric or load_rubric("pairwise" if pairs else task_rubric)
        choices = {
            "wordings": wordings,
            "verdicts": verdicts,
            "repeats": repeats,
            "decided": stop_when == "decided",
            "chat": chat,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        settings = resolve_judge_settings(judge_rubric, choices)
        human_labels = (
            None if labels is None else _load_human_labels(labels, judge_rubric, runs.answers)
        )
        resolved = resolve_judges(judges, options or {})
        if models is None:
            models = stack.enter_context(JudgeLoader())
        result = judge_all(runs, resolved, models, settings, follow, listener)
        return _make_judgings(
            path, runs, result, labels=human_labels, weights=weights, combine=combine
        )


def _read_judges(
    judge: "str | BaseLLM | Sequence[str | BaseLLM]", pairs: object
) -> "tuple[str | BaseLLM, ...]":
    """Return the judges of a call.

    Raises:
        InputError: there is no judge, or `pairs` is not a list.
    """
    judges = as_judges(judge)
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise InputError(f"{arg('pairs')} must be a list of directories, got {pairs!r:.60}")
    if not judges:
        raise InputError(
            f"{arg('judge=')} must contain at least one model; use judgings() to read "
            "stored judgements"
        )
    return judges


def _make_judgings(path: Path, runs: OpenRuns, result: JudgeResult, **options: Any) -> Judgings:
    """Return the judgements of a call.

    Args:
        path: The directory of the run.
        runs: The judged runs, open.
        result: What `judge_all` returned.
        options: Further arguments of `summarize`.
    """
    summaries = []
    if any(judge_run.judgements for judge_run in result.judged):
        summaries = [summarize(result.judged, groups=result.answers.groups, **options)]
    work = {
        name: {field: getattr(done, field) for field in done.__slots__}
        for name, done in result.work.items()
    }
    return Judgings(
        path,
        tuple(summaries),
        build_flagged_table(runs.answers.all()),
        result.done,
        result.planned,
        work,
        _describe_runs(runs),
    )


def judgings(
    run: "Frames | str | Path",
    rubric: "str | Path | Mapping[str, Any] | Rubric | None" = None,
    *,
    labels: str | Path | None = None,
    weights: Sequence[float] | None = None,
    combine: Combine = "mean",
    **reading: Any,
) -> Judgings:
    """Return the stored judgements of a run, summarized again without a model.

    Args:
        run: The run, as for `judge`.
        rubric: The rubric of the judgements to return, by its name, or as for `judge`. Default: the
            judgements by all rubrics.
        labels: A JSONL file of people's labels, which correct the mean.
        weights: One positive weight per judge of a jury; None weights all equally.
        combine: How a jury's value is computed from its judges' values: "mean" or "majority".
        reading: data=, task= and allow_task_code=, as for `open_run`.

    Raises:
        InputError: nothing is stored, or an argument cannot be used.
        RunError: there is no run, or a file is corrupt.
    """
    path = _path(run)
    with ExitStack() as stack:
        runs = open_runs([path], reading, stack)
        groups = load_juries(path)
    if not groups:
        raise InputError(f"the run {path} has no judgements; pass a model with {arg('judge=')}")
    if rubric is not None:
        groups = _choose_judgements(path, groups, rubric)
    weights = check_jury(max(map(len, groups)), weights, combine)
    summaries = []
    samples = [(problem, index) for problem, index, _ in runs.answers.all()]
    stored = count_judgements(path, groups, samples)
    for group in groups:
        group_rubric = group[0].judging.settings.rubric
        human_labels = None
        if labels is not None and not group_rubric.pairs:
            human_labels = _load_human_labels(labels, group_rubric, runs.answers)
        jury: dict[str, Any] = {"weights": weights, "combine": combine} if len(group) > 1 else {}
        summaries.append(summarize(group, groups=runs.answers.groups, labels=human_labels, **jury))
    flagged = build_flagged_table(runs.answers.all())
    about = _describe_runs(runs)
    return Judgings(
        path,
        tuple(summaries),
        flagged,
        stored.done,
        stored.planned,
        about=about,
        unfinished=stored.unfinished,
    )


def _choose_judgements(
    path: Path,
    groups: Sequence[list[JudgementSet]],
    rubric: "str | Path | Mapping[str, Any] | Rubric",
) -> list[list[JudgementSet]]:
    """Return the juries that judged by a rubric.

    Args:
        path: The directory of the run.
        groups: The juries.
        rubric: As for `judgings`.
    """
    names = [group[0].judging.settings.rubric.name for group in groups]
    name = rubric if rubric in names else load_rubric(rubric).name
    if name not in names:
        raise InputError(
            f"the run {path} has no judgements by the rubric {name}, but by "
            f"{', '.join(dict.fromkeys(names))}; set {arg('rubric=')} to one of these, or pass a "
            f"model with {arg('judge=')}"
        )
    return [group for group, other in zip(groups, names, strict=True) if other == name]


def _describe_runs(runs: OpenRuns) -> tuple[str, ...]:
    """Return a line about each run, and how the others differ from the first."""
    settings = [
        KeySettings.of_info(run.info, num_fewshot=job.data.num_fewshot)
        for run, job in zip(runs.runs, runs.jobs, strict=True)
    ]
    lines = [settings[0].describe(runs.jobs[0].task.name)]
    for run, other in zip(runs.runs[1:], settings[1:], strict=True):
        pairs = ", ".join(differing_settings(settings[0], other)) or NO_SETTING
        lines.append(f"pairs with {run.path.name}, which differs in: {pairs}")
    lines += [
        f"{run.path.name}: {describe_missing_samples(run)}" for run in runs.runs if run.missing > 0
    ]
    return tuple(lines)


def as_judges(judge: "str | BaseLLM | Sequence[str | BaseLLM]") -> "tuple[str | BaseLLM, ...]":
    """Return the judges that a user names, as a tuple.

    Raises:
        InputError: a judge is neither a name nor a loaded model.
    """
    if isinstance(judge, str) or hasattr(judge, "score_stream"):
        return (judge,)  # type: ignore[return-value]
    several = isinstance(judge, list | tuple)
    if not several or not all(
        isinstance(name, str) or hasattr(name, "score_stream") for name in judge
    ):
        raise InputError(f"{arg('judge')} must be model names or LLMs, got {judge!r:.60}")
    return tuple(judge)


def _load_human_labels(
    labels: str | Path, rubric: Rubric, answers: AnswerSet
) -> dict[tuple[str, int], float]:
    """Return people's labels of a run's answers."""
    if rubric.pairs:
        raise InputError(
            f"{arg('labels=')} cannot be used with a rubric that compares pairs; remove the labels"
        )
    labelled = labels_of(as_path("labels", labels), rubric.choices, rubric.name)
    if not any((0, index) in answers.texts.get(problem, ()) for problem, index in labelled):
        raise InputError(
            f"the file {labels} has no labels for the answers of this run; pass a file with "
            "labels for this run"
        )
    return labelled


def _path(run: "Frames | str | Path") -> Path:
    view = getattr(run, "view", None)
    return as_path("run", run) if view is None else Path(view.path)


def _check_listeners(listener: object, follow: object, models: object) -> None:
    """Raise InputError if the listener, the follow function or the loader has the wrong type."""
    kinds = {"listener": (listener, Listener), "models": (models, JudgeLoader)}
    for name, (value, kind) in kinds.items():
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{arg(name)} must be a {kind.__name__} or None, got {value!r:.60}")
    if follow is not None and not callable(follow):
        raise InputError(f"follow must be a function or None, got {follow!r:.60}")


def _following(listener: Listener, progress: bool) -> Follow:
    def follow(begin: Callable[[Stop], Iterable[tuple[int, int]]], unit: str) -> tuple[int, int]:
        done = planned = 0
        bars = load_tqdm()
        with listener.poll_interrupts() as stop, bars(unit=f" {unit}", disable=not progress) as bar:
            for done, planned in begin(stop):
                bar.total = planned
                bar.update(done - bar.n)
        return done, planned

    return follow
