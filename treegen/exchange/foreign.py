"""What a log of another tool has, whichever wrote it, and how it becomes a run directory."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from treegen.errors import InputError, RunError
from treegen.evals.asked.settings import settle
from treegen.evals.identity import content_of
from treegen.evals.job import Job, load_job
from treegen.evals.judged.results import write_results
from treegen.evals.verdict import Verdict
from treegen.runs import RunDir, RunSettings
from treegen.runs.files import reason
from treegen.runs.made import check_directory

PROBLEMS: Final = "problems.jsonl"
"""The file in the directory of an imported run with the problems of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSample:
    """One sample of a log.

    verdicts: by filter; a filter of the log that is not here found no answer.
    finish_reason: "stop", "length", or what else the log says.
    thinking: characters of the text, from its start, that are thinking.
    thinking_tokens: its tokens, 0 if they are not known.
    time: when it was finished, in ISO 8601; None if that is not known.
    """

    problem_id: str
    index: int
    text: str
    verdicts: Mapping[str, Verdict]
    num_tokens: int = 0
    prompt_tokens: int = 0
    finish_reason: str = "stop"
    thinking: int = 0
    thinking_tokens: int = 0
    time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLog:
    """One task of one model, as a log tells of it.

    task, version: as the log calls them. model: its name. source: the tool and its version.
    problems: rows with `id`, `question` and `answer`, in order.
    filters: the names of its scores, the headline first.
    num_samples: of each problem.
    sampling: what the log tells of it, by the names of `SamplingParams`.
    num_fewshot: solved examples before each problem.
    notices: what of the log is left out and why, one sentence each.
    """

    task: str
    version: str
    model: str
    source: str
    problems: Sequence[Mapping[str, str]]
    filters: Sequence[str]
    num_samples: int
    samples: Sequence[ForeignSample]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    num_fewshot: int = 0
    notices: tuple[str, ...] = ()


def make_runs(logs: Sequence[ForeignLog], path: Path) -> list[Path]:
    """Write logs as run directories and return them: `path`, or one below it for each of several.

    Raises:
        InputError, RunError: as for `make_run`.
    """
    for log in logs:
        _check(log)
    if len(logs) == 1:
        return [make_run(logs[0], path)]
    return [make_run(log, path / log.task.replace("/", "_")) for log in logs]


def make_run(log: ForeignLog, path: Path) -> Path:
    """Write a log as a run directory, with results.json; returns the directory.

    Raises:
        InputError: the log has no problem or no score, or one sample twice.
        RunError: the directory is not empty, or cannot be written.
    """
    _check(log)
    check_directory(path)
    # os.path, because a Path raises for names that are too long.
    if os.path.exists(path / "run.json"):
        raise RunError(f"{path} already holds a run; name another directory")
    if os.path.exists(path) and any(path.iterdir()):
        raise RunError(f"{path} is not empty; name another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        rows = "".join(f"{json.dumps(dict(row))}\n" for row in log.problems)
        (path / PROBLEMS).write_text(rows)
        job = _job(log, path)
        with RunDir.create(path, _settings(log, job)) as run:
            for sample in log.samples:
                run.append(_record(sample, log.filters))
            write_results(job, run)
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)  # nothing in it was there before
        if isinstance(error, OSError):
            raise RunError(f"cannot write {path}: {reason(error)}") from error
        raise
    return path


def _check(log: ForeignLog) -> None:
    if not log.problems:
        raise InputError(f"the log of {log.task} has no samples; name one that has some")
    if not log.filters:
        raise InputError(
            f"the log of {log.task} has no scores that say right or wrong; score it first"
        )
    seen: set[tuple[str, int]] = set()
    for sample in log.samples:
        key = sample.problem_id, sample.index
        if key in seen:
            raise InputError(f"the log has sample {key[1]} of problem {key[0]!r} twice; remove one")
        seen.add(key)


def _job(log: ForeignLog, path: Path) -> Job:
    given = {
        "task": "imported",
        "data": str((path / PROBLEMS).absolute()),
        "model": log.model or "unknown",
        "num_samples": log.num_samples,
        "extra": {
            "name": log.task,
            "version": log.version or "0",
            "filters": json.dumps(list(log.filters)),
            "fewshot": str(log.num_fewshot),
        },
        **log.sampling,
    }
    return load_job(settle(given))


def _settings(log: ForeignLog, job: Job) -> RunSettings:
    return RunSettings(
        identity={
            **content_of(job),
            "model": {"fingerprint": log.model or "unknown", "dtype": "unknown"},
            "imported": log.source,
            **job.settings.identity(),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=job.planned,
        free=job.settings.free_choices(),
        computing={"imported from": log.source},
    )


def _record(sample: ForeignSample, filters: Sequence[str]) -> dict[str, Any]:
    nothing = Verdict(None, False)
    record: dict[str, Any] = {
        "problem_id": sample.problem_id,
        "sample_index": sample.index,
        "text": sample.text,
        "num_tokens": sample.num_tokens,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": sample.prompt_tokens,
        "verdicts": {name: _told(sample.verdicts.get(name, nothing)) for name in filters},
    }
    if sample.thinking:
        record["thinking"] = {
            "tokens": sample.thinking_tokens,
            "end": sample.thinking,
            "closed": sample.thinking < len(sample.text),
        }
    return record | ({"time": sample.time} if sample.time else {})


def _told(verdict: Verdict) -> dict[str, Any]:
    found: dict[str, Any] = {"answer": verdict.answer, "correct": verdict.correct}
    return found if verdict.credit is None else found | {"credit": verdict.credit}


def verdict_of(score: float, answer: str | None, text: str) -> Verdict:
    """Return a score from 0 to 1 as a verdict: right if it is 1, else of partial credit.

    answer: what was read from the text. A right sample without one has its text for an answer.
    """
    right = score >= 1
    if right and answer is None:
        answer = text.strip()
    return Verdict(answer, right, None if score in (0, 1) else float(score))
