"""Runs whose samples are there: scored again, by a verifier, or by their model's own picks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.errors import RunError, RunInUseError
from treegen.evals.config.verifier_settings import DEFAULTS
from treegen.evals.identity import load_stored_job
from treegen.evals.model import load_llm
from treegen.evals.pipeline.evaluation import EvaluationResult
from treegen.evals.pipeline.listener import Follow, Listener
from treegen.evals.pipeline.program_scoring import (
    check_execution_options,
    describe_unscored,
    rescore_programs,
)
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.scoring.results import build_results
from treegen.evals.scoring.universal_self_consistency import pick_samples, questions_of
from treegen.evals.scoring.verifier_scores import score_with_verifier
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.job import Job


@contextmanager
def _open_run(
    path: Path, asked: Mapping[str, Any], listener: Listener
) -> Iterator[tuple[RunDir, "Job"]]:
    """Open a run, and read its problems. asked: as for `load_stored_job`."""
    with RunDir.open(path) as run:
        for line in run.notices:
            listener.warn(line)
        yield run, load_stored_job(asked, run)


def rescore_run(
    path: Path,
    asked: Mapping[str, Any],
    listener: Listener,
    execution: ExecutionOptions | None = None,
) -> EvaluationResult:
    """Score the samples of a run again and rewrite its results.json; needs no model.

    Args:
        asked: Where the problems are, and settings that have changed, by their names.
        execution: Permission to run programs that the model wrote.

    Raises:
        RunError: there is no run, or it is damaged.
        InputError: the problems are not those of the run, or programs would have to run.
    """
    with _open_run(path, asked, listener) as (run, job), ExitStack() as stack:
        check_execution_options([job.task], execution)
        judging = rescore_programs(job, run, execution, listener)
        if judging:
            stack.callback(judging.close)
        results, report = build_results(job, run, judging, anew=True)
        try:
            run.write_results(results)
        except RunInUseError as error:
            listener.warn(f"results.json is left as it is: {error}")
        told = describe_unscored(job, run, judging)
        return EvaluationResult(path, results, report, max(run.missing, 0), told, again="")


def score_run_with_verifier(
    path: Path,
    asked: Mapping[str, Any],
    listener: Listener,
    follow: Follow,
    verifier: str,
    settings: Mapping[str, Any],
    **how: Any,
) -> int:
    """Let a verifier score the samples of a run that it has not scored; returns the scores.

    Args:
        settings: Those that are not at their defaults; see `verifier_settings`.
        how: Device, memory and batch size; see `load_verifier`.

    Raises:
        As `load_verifier` and `verify`.
    """
    from treegen.search.verifier import load_verifier

    settings = {**DEFAULTS, **settings}
    with _open_run(path, asked, listener) as (run, job):
        listener.tell(f"loading {verifier}")
        judge = load_verifier(verifier, **how, **settings)
        by = {"verifier": verifier, **settings, "tokens": list(settings["tokens"])}
        if not settings["turns"]:  # scores from before there was a choice go on
            del by["turns"]
        done, _ = follow(lambda stop: score_with_verifier(job, run, judge, by, stop=stop), "scores")
        return done


def pick_run_samples(
    path: Path,
    asked: Mapping[str, Any],
    listener: Listener,
    follow: Follow,
    *,
    most: int | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Let the model of a run pick the most consistent sample of each problem; returns the picks.

    Args:
        most: Show it the first samples only.

    Raises:
        RunError: picks are missing.
        As `pick` and the loading of the model.
    """
    with _open_run(path, asked, listener) as (run, job):
        questions_of(job, run, most)  # what cannot be asked is refused before a model is loaded
        engine = replace(job.settings.engine, trust_remote_code=trust_remote_code)
        listener.loading(engine.model)
        llm = load_llm(engine, run.info.identity["model"]["fingerprint"])
        done, planned = follow(
            lambda stop: pick_samples(job, run, llm, most=most, stop=stop), "picks"
        )
        if done < planned:
            raise RunError(f"{planned - done:,} picks are missing; give the command again")
        return done
