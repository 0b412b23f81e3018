"""The content of a log of another tool, and its conversion to a run directory.

A log is untrusted: pydantic schemas check it. Every field that is used has a type and bounds,
nothing is converted (1.7 is not a document number, and "no" is not true), and an error names the
file, the line or sample, and the field.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from treegen.common.files import create_locked, path_component, sweep
from treegen.common.params import SamplingParams
from treegen.errors import InputError, RunError
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import build_content_identity
from treegen.evals.job import Job, load_job
from treegen.evals.scoring.results import write_results
from treegen.runs import RunDir, RunSettings
from treegen.runs.files import check_directory, describe_write_error

MAX_SAMPLES: Final = 1_000_000
"""The largest number of samples of a problem in a log, or of its epochs."""
_MAX_COUNT: Final = 2**53


def _is_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Index = Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
ProblemId = Annotated[str, Field(min_length=1)]
"""The id of a problem; those of treegen's runs may have any length."""
Time = Annotated[str, AfterValidator(_is_time)]


class Schema(BaseModel):
    """A part of a log; only the fields that are declared here are checked."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


_Kind = TypeVar("_Kind", bound=Schema)


def validate(kind: type[_Kind], value: Any, where: str) -> _Kind:
    """Return a part of a log after checking it.

    Args:
        kind: The schema of the part.
        value: The value in the log.
        where: The file, and the line or sample, for the message.

    Raises:
        InputError: A field is missing, has another type or is out of its bounds.
    """
    if not isinstance(value, Mapping):
        raise InputError(
            f"{where} must be a JSON object, got {value!r:.60}; fix or remove the entry"
        )
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        first, *more_errors = error.errors(include_url=False)
        loc = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        more = f" ({len(more_errors)} more errors)" if more_errors else ""
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise InputError(
            f"{where}: {loc or 'the object'}: {message}{got}{more}; fix or remove the entry"
        ) from None


PROBLEMS: Final = "problems.jsonl"
"""The file with the problems of the log, in the directory of an imported run."""
_SCRATCH: Final = ".import.{}.tmp"
_SCRATCHES: Final = ".import.[0-9]*.tmp"


class ExternalVerdict(Schema):
    """The score of a sample in a log; the fields are as in `Verdict`."""

    answer: str | None
    """The answer that the scorer read; None if it read none."""
    correct: bool
    credit: Share | None = None
    """Partial credit from 0 to 1; None without partial credit."""


class ExternalProblem(Schema):
    """A problem of a log."""

    id: ProblemId
    question: str
    answer: str
    group: str = ""
    """For clustered error bars, if it has one."""
    prompt: str = ""
    """The text of the prompt; empty if the log does not have it."""


class ExternalSample(Schema):
    """A sample of a log."""

    problem_id: ProblemId
    index: Index
    text: str
    verdicts: dict[str, ExternalVerdict]
    """By filter. A filter that is missing here did not score the sample, so the sample does not
    count in that filter's metrics."""
    num_tokens: Count = 0
    prompt_tokens: Count = 0
    finish_reason: str = "stop"
    """"stop", "length", or another reason of the log."""
    thinking: Count = 0
    """The number of characters of reasoning at the start of the text."""
    thinking_tokens: Count = 0
    """The number of reasoning tokens, 0 if it is not known."""
    time: Time | None = None
    """When it was finished, in ISO 8601; None if that is not known."""


class ExternalLog(Schema):
    """One task of one model, as a log describes it."""

    task: Name
    """The task's name in the log."""
    version: str
    """The task's version in the log."""
    model: str
    """Its name."""
    source: str
    """The tool and its version."""
    problems: tuple[ExternalProblem, ...]
    filters: tuple[Name, ...]
    """The names of its scores, the headline first."""
    num_samples: int
    """Samples of each problem."""
    samples: tuple[ExternalSample, ...]
    sampling: dict[str, Any] = Field(default_factory=dict)
    """The sampling parameters in the log, by the names of `SamplingParams`."""
    num_fewshot: Count = 0
    """Few-shot examples before each problem."""
    system_instruction: str | None = None
    """The text before each prompt, in chat the system's turn."""
    recorded: tuple[str, ...] = ()
    """The names of the settings that the log contains; the values of others are not known."""
    notices: tuple[str, ...] = ()
    """What treegen leaves out of the log and why, one sentence each."""


def make_runs(logs: Sequence[ExternalLog], path: Path) -> list[Path]:
    """Write logs as run directories, all of them or none.

    Each run is written in a scratch folder and moved into its directory when all are complete. A
    failure removes the scratch folders, and the directories that this call made.

    Args:
        logs: The logs, each of one task.
        path: The directory of the run; for several logs, the parent of the runs' directories.

    Returns:
        The directories.

    Raises:
        InputError: A log has no problem or no score, one sample twice, or a task whose name cannot
            name a folder.
        RunError: A directory is not empty, or cannot be written.
    """
    for log in logs:
        _check_log(log)
    directories = [path]
    if len(logs) > 1:
        directories = [path / path_component(log.task, "a task of the log") for log in logs]
    try:
        for directory in directories:
            check_directory(directory)
            sweep(directory, _SCRATCHES)  # of interrupted imports
        for directory in directories:
            _check_empty(directory)
        with ExitStack() as stack:
            scratches = [
                stack.enter_context(_make_scratch_folder(directory)) for directory in directories
            ]
            for log, directory, scratch in zip(logs, directories, scratches, strict=True):
                _check_empty(directory)
                _write_run(log, directory, scratch)
            _move_runs(scratches, directories)
    except OSError as error:
        raise RunError(describe_write_error(error.filename or path, error)) from error
    return directories


def usable_sampling(parameters: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Return the sampling parameters of a log that treegen has too.

    Args:
        parameters: The parameters, by the names of `SamplingParams`.
        notices: Receives a sentence for each parameter that is left out.
    """
    usable = {}
    for name, value in parameters.items():
        try:
            SamplingParams(**{name: value})
        except (InputError, TypeError, ValueError):
            notices.append(
                f"{name}={value!r:.40} of the log is not supported by treegen and is left out"
            )
        else:
            usable[name] = value
    return usable


def score_to_verdict(score: float, answer: str | None, text: str) -> ExternalVerdict:
    """Return a score from 0 to 1 as a verdict: correct if it is 1, otherwise partial credit.

    Args:
        score: The score.
        answer: The answer read from the text. A correct sample without one has its text as answer.
        text: The text of the sample.
    """
    right = score >= 1
    if right and answer is None:
        answer = text.strip()
    credit = None if score in (0, 1) else float(score)
    return ExternalVerdict(answer=answer, correct=right, credit=credit)


def _check_empty(path: Path) -> None:
    """Raise RunError unless a run can be created in a directory."""
    # os.path, because a Path raises for names that are too long.
    if os.path.exists(path / "run.json"):
        raise RunError(f"the directory {path} already contains a run; choose another directory")
    names = os.listdir(path) if os.path.exists(path) else []
    if not all(Path(name).match(_SCRATCHES) for name in names):
        raise RunError(f"the directory {path} is not empty; choose another directory")


@contextmanager
def _make_scratch_folder(path: Path) -> Iterator[Path]:
    """Make a directory with a scratch folder in it; yield that folder, and remove it at the end.

    Directories that were made here are removed if they are empty at the end.
    """
    missing = [directory for directory in (path, *path.parents) if not os.path.exists(directory)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        scratch = path / _SCRATCH.format(os.getpid())
        with create_locked(scratch, folder=True):
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    finally:
        for directory in missing:  # from the innermost
            with suppress(OSError):  # the directory is not empty
                directory.rmdir()


def _write_run(log: ExternalLog, path: Path, scratch: Path) -> None:
    """Write a log as a run in a scratch folder.

    Args:
        log: The log.
        path: The final directory of the run.
        scratch: The folder to write into.
    """
    rows = "".join(f"{json.dumps(_to_row(problem))}\n" for problem in log.problems)
    (scratch / PROBLEMS).write_text(rows, encoding="ascii")
    job = _make_job(log, path, scratch)
    with RunDir.create(scratch, _make_settings(log, job)) as run:
        for sample in log.samples:
            run.append(_to_record(sample))
        write_results(job, run)


def _move_runs(scratches: Sequence[Path], paths: Sequence[Path]) -> None:
    """Move the files of runs into their directories, and last each run.json, which makes a run."""
    files = [
        (scratch / name, path / name)
        for scratch, path in zip(scratches, paths, strict=True)
        for name in os.listdir(scratch)
        if name != "run.lock"
    ]
    moved: list[tuple[Path, os.stat_result]] = []
    try:
        for source, target in sorted(files, key=lambda file: file[1].name == "run.json"):
            if os.path.lexists(target):
                raise RunError(
                    f"another program wrote to the directory {target.parent} during the import; "
                    "choose another directory"
                )
            made = os.lstat(source)
            os.rename(source, target)
            moved.append((target, made))
    except BaseException:
        for target, made in moved:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(target), made):  # not another program's file
                    target.unlink()
        raise


def _check_log(log: ExternalLog) -> None:
    """Raise InputError for a log without problems, filters or samples, or with duplicates."""
    problem = ""
    if not log.problems:
        problem = "contains no samples; pass a log with samples"
    elif not log.filters:
        problem = "has no scores from 0 to 1; score the log first"
    elif not log.samples:
        problem = "has no sample with a score; score the log first"
    elif not 1 <= log.num_samples <= MAX_SAMPLES:
        problem = f"must have 1 to {MAX_SAMPLES:,} samples per problem, got {log.num_samples}"
    if problem:
        raise InputError(f"the log of the task {log.task} {problem}")
    ((problem_id, count),) = Counter(problem.id for problem in log.problems).most_common(1)
    if count > 1:
        raise InputError(
            f"the log has two problems with the id {problem_id!r}; rename one of the problems"
        )
    keys = Counter((sample.problem_id, sample.index) for sample in log.samples)
    (((problem_id, index), count),) = keys.most_common(1)
    if count > 1:
        raise InputError(
            f"the log contains sample {index} of problem {problem_id!r} twice; remove one of the "
            "two entries"
        )


def _to_row(problem: ExternalProblem) -> dict[str, str]:
    return {k: v for k, v in problem.model_dump().items() if v or k not in ("group", "prompt")}


def _make_job(log: ExternalLog, path: Path, scratch: Path) -> Job:
    """Return the job of an imported run.

    Args:
        log: The log.
        path: The final directory of the run, which its settings name.
        scratch: The folder with the file of problems.
    """
    choices = {
        "task": "imported",
        "data": str((scratch / PROBLEMS).absolute()),
        "model": log.model or "unknown",
        "num_samples": log.num_samples,
        "extra": {
            "name": log.task,
            "version": log.version or "0",
            "filters": json.dumps(list(log.filters)),
            "fewshot": str(log.num_fewshot),
            "recorded": json.dumps(list(log.recorded)),
        },
        "system_instruction": log.system_instruction,
        **log.sampling,
    }
    job = load_job(resolve_eval_settings(choices))
    path_of_problems = str((path / PROBLEMS).absolute())
    options = replace(job.settings.options, data=path_of_problems)
    settings = replace(job.settings, options=options)
    return replace(job, settings=settings, data=replace(job.data, source=path_of_problems))


def _make_settings(log: ExternalLog, job: Job) -> RunSettings:
    return RunSettings(
        identity={
            **build_content_identity(job),
            "model": {"fingerprint": log.model or "unknown", "dtype": "unknown"},
            "imported": log.source,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        computing={"imported from": log.source},
    )


def _to_record(sample: ExternalSample) -> dict[str, Any]:
    record: dict[str, Any] = {
        "problem_id": sample.problem_id,
        "sample_index": sample.index,
        "text": sample.text,
        "num_tokens": sample.num_tokens,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": sample.prompt_tokens,
        "verdicts": {
            name: verdict.model_dump(exclude_defaults=True) | {"answer": verdict.answer}
            for name, verdict in sample.verdicts.items()
        },
    }
    if sample.thinking:
        record["thinking"] = {
            "tokens": sample.thinking_tokens,
            "end": sample.thinking,
            "closed": sample.thinking < len(sample.text),
        }
    return record | ({"time": sample.time} if sample.time else {})
