"""Runs whose samples are there: scored again, by a verifier, or by their model's own picks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.errors import RunError, RunInUseError
from treegen.evals.asked.verifier_args import DEFAULTS
from treegen.evals.identity import stored_job
from treegen.evals.judged.consistency import pick, questions_of
from treegen.evals.judged.execution import Execution
from treegen.evals.judged.results import results_of
from treegen.evals.judged.verify import verify
from treegen.evals.model import load_llm
from treegen.evals.running.evaluation import Evaluated
from treegen.evals.running.judging import check_of_use, complaint, rejudged
from treegen.evals.running.listener import Follow, Listener
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.job import Job


@contextmanager
def _opened(
    path: Path, asked: Mapping[str, Any], listener: Listener
) -> Iterator[tuple[RunDir, "Job"]]:
    """Open a run, and read its problems. asked: as for `stored_job`."""
    with RunDir.open(path) as run:
        for line in run.notices:
            listener.warn(line)
        yield run, stored_job(asked, run)


def score_again(
    path: Path, asked: Mapping[str, Any], listener: Listener, execution: Execution | None = None
) -> Evaluated:
    """Score the samples of a run again and rewrite its results.json; needs no model.

    asked: where the problems are, and settings that have changed, by their names.
    execution: permission to run programs that the model wrote.

    Raises:
        RunError: there is no run, or it is damaged.
        InputError: the problems are not those of the run, or programs would have to run.
    """
    with _opened(path, asked, listener) as (run, job), ExitStack() as stack:
        check_of_use([job.task], execution)
        judging = rejudged(job, run, execution, listener)
        if judging:
            stack.callback(judging.close)
        results, report = results_of(job, run, judging, anew=True)
        try:
            run.write_results(results)
        except RunInUseError as error:
            listener.warn(f"results.json is left as it is: {error}")
        told = complaint(job, run, judging)
        return Evaluated(path, results, report, max(run.missing, 0), told, again="")


def verify_again(
    path: Path, asked: Mapping[str, Any], listener: Listener, follow: Follow, verifier: str,
    settings: Mapping[str, Any], **how: Any,
) -> int:  # fmt: skip
    """Let a verifier score the samples of a run that it has not scored; returns the scores.

    settings: those that are not at their defaults; see `verifier_settings`.
    how: device, memory and batch size; see `load_verifier`.

    Raises:
        As `load_verifier` and `verify`.
    """
    from treegen.search.verifier import load_verifier

    settings = {**DEFAULTS, **settings}
    with _opened(path, asked, listener) as (run, job):
        listener.tell(f"loading {verifier}")
        judge = load_verifier(verifier, **how, **settings)
        by = {"verifier": verifier, **settings, "tokens": list(settings["tokens"])}
        if not settings["turns"]:  # scores from before there was a choice go on
            del by["turns"]
        done, _ = follow(lambda stop: verify(job, run, judge, by, stop=stop), "scores")
        return done


def pick_again(
    path: Path, asked: Mapping[str, Any], listener: Listener, follow: Follow, *,
    most: int | None = None, trust_remote_code: bool = False,
) -> int:  # fmt: skip
    """Let the model of a run pick the most consistent sample of each problem; returns the picks.

    most: show it the first samples only.

    Raises:
        RunError: picks are missing.
        As `pick` and the loading of the model.
    """
    with _opened(path, asked, listener) as (run, job):
        questions_of(job, run, most)  # what cannot be asked is refused before a model is loaded
        engine = replace(job.settings.engine, trust_remote_code=trust_remote_code)
        listener.loading(engine.model)
        llm = load_llm(engine, run.info.identity["model"]["fingerprint"])
        done, planned = follow(lambda stop: pick(job, run, llm, most=most, stop=stop), "picks")
        if done < planned:
            raise RunError(f"{planned - done:,} picks are missing; give the command again")
        return done
