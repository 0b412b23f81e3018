"""Score a finished run's samples again: by its task, by a verifier, or by its model's picks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.errors import InputError, Message, RunError, RunInUseError
from treegen.evals.arguments import VERIFIER_DEFAULTS
from treegen.evals.config.eval_settings import split_votes
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
from treegen.evals.scoring.vote_tables import SCORES, explain_votes, read_voters
from treegen.evals.thinking import get_answer_text
from treegen.runs import RunDir, open_for_append

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.model.scorers.verifier import Verifier


@contextmanager
def _open_run(
    path: Path, choices: Mapping[str, Any], listener: Listener
) -> Iterator[tuple[RunDir, Job]]:
    """Open a run and load its job.

    Args:
        path: The run directory.
        choices: As for `load_stored_job`.
        listener: Receives the notices of the run.
    """
    with RunDir.open(path) as run:
        for line in run.notices:
            listener.warn(line)
        yield run, load_stored_job(choices, run)


def rescore_run(
    path: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    execution: ExecutionOptions | None = None,
) -> EvaluationResult:
    """Score the samples of a run again and rewrite its results.json; needs no model.

    Args:
        path: The run directory.
        choices: Where the problems are, and settings that have changed, by their names.
        listener: Receives messages and progress.
        execution: Permission to run programs that the model wrote.

    Raises:
        RunError: there is no run, or it is corrupt.
        InputError: the problems are not those of the run, programs would have to run, or none of
            the requested votes can be computed.
    """
    with _open_run(path, choices, listener) as (run, job), ExitStack() as stack:
        check_execution_options([job.task], execution)
        if names := split_votes(choices.get("votes") or ()):
            job = _leave_out_votes(job, run, names, listener)
        program_scoring = rescore_programs(job, run, execution, listener, stack)
        results, report = build_results(job, run, program_scoring, rescore=True)
        try:
            run.write_results(results)
        except RunInUseError as error:
            listener.warn(f"results.json was not rewritten: {error}")
        unscored = describe_unscored(job, run, program_scoring)
        return EvaluationResult(
            path, results, report, max(run.missing, 0), unscored, resume_hint=""
        )


def _leave_out_votes(job: Job, run: RunDir, names: Sequence[str], listener: Listener) -> Job:
    """Return the job without the requested votes that cannot be computed.

    Args:
        job: The job of the run.
        run: The run.
        names: The requested votes.
        listener: Receives a warning for each vote that is left out.

    Raises:
        InputError: none of the votes can be computed.
    """
    left_out: set[str] = set()
    why: list[str] = []
    numbers, inputs = read_voters(job, run)
    for name in names:
        reasons = explain_votes([name], numbers, inputs)
        if all(reasons.values()):
            left_out.add(name)
            why += [f"{vote} ({reason.marked})" for vote, reason in reasons.items()]
    if left_out.issuperset(names):
        reason = "; ".join(dict.fromkeys(why)) or "the samples have no numbers that a vote can use"
        raise InputError(f"no vote can be computed: {reason}")
    for line in why:
        listener.warn(Message(f"the results do not include the vote {line}"))
    votes = tuple(vote for vote in job.settings.votes if vote not in left_out)
    return replace(job, settings=replace(job.settings, votes=votes))


def score_run_with_verifier(
    path: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    follow: Follow,
    verifier: str,
    settings: Mapping[str, Any],
    **how: Any,
) -> int:
    """Score the samples of a run with a verifier, except those it has scored already.

    Args:
        path: The run directory.
        choices: Options for opening the run, as for `load_stored_job`.
        listener: Receives messages.
        follow: Consumes the steps and shows progress.
        verifier: The verifier's directory or name.
        settings: Settings that differ from their defaults; see `VERIFIER_DEFAULTS`.
        how: Device, memory and batch size; see `load_verifier`.

    Returns:
        The number of scores.

    Raises:
        As `load_verifier` and `score_with_verifier`.
    """
    from treegen.search.reward import load_verifier

    settings = {**VERIFIER_DEFAULTS, **settings}
    with _open_run(path, choices, listener) as (run, job):
        listener.tell(f"loading {verifier}")
        model = load_verifier(verifier, **how, **settings)
        by = {"verifier": verifier, **settings, "tokens": list(settings["tokens"])}
        if not settings["turns"]:  # so that scores from before this setting existed stay valid
            del by["turns"]
        done, _ = follow(lambda stop: score_with_verifier(job, run, model, by, stop=stop), "scores")
        return done


def pick_run_samples(
    path: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    follow: Follow,
    *,
    most: int | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Let the model of a run pick the most consistent sample of each problem.

    Args:
        path: The run directory.
        choices: Options for opening the run, as for `load_stored_job`.
        listener: Receives messages.
        follow: Consumes the steps and shows progress.
        most: Show the model at most this many samples, from the first; None shows all.
        trust_remote_code: Whether code in the model's directory may run.

    Returns:
        The number of picks.

    Raises:
        RunError: picks are missing, or the run was imported.
        As `pick_samples` and the loading of the model.
    """
    with _open_run(path, choices, listener) as (run, job):
        if "imported" in run.info.identity:
            raise RunError(
                f"{path} was imported from the log of another tool, so treegen does not know the "
                "model that drew its samples; use a run of `treegen eval`"
            )
        questions_of(job, run, most)  # raises before a model is loaded if a question is impossible
        engine = replace(job.settings.engine, trust_remote_code=trust_remote_code)
        listener.loading(engine.model)
        llm = load_llm(engine, run.info.identity["model"]["fingerprint"])
        done, planned = follow(
            lambda stop: pick_samples(job, run, llm, most=most, stop=stop), "picks"
        )
        if done < planned:
            raise RunError(f"{planned - done:,} picks are missing; repeat the command")
        return done


_BATCH_SIZE = 256  # samples of a batch; `stop` is polled between batches


def score_with_verifier(
    job: Job,
    run: RunDir,
    verifier: Verifier,
    by: dict[str, Any],
    *,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Score every sample without a score, and store the scores.

    The verifier scores the answer of a sample, without its reasoning. Each line also has the value
    of each step.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        verifier: The verifier.
        by: Identifies the verifier. The file must have no scores by another one, or by the user.
        stop: Polled before each batch; once it returns a true value, the iteration ends.

    Yields:
        (scored samples, all samples) after every batch.

    Raises:
        InputError: the file has scores by something else, or a text is too long for the verifier.
        RunError: the scores cannot be written.
    """
    questions = {problem.id: problem.question for problem in job.data.problems}
    records = [(r["problem_id"], r["sample_index"], get_answer_text(r)) for r in run.records()]
    path = run.path / SCORES
    with open_for_append(path, "scores.lock") as file:
        if any(row.get("by") != by for row in file.records()):
            raise InputError(
                f"{path} has scores that this verifier did not compute; move the file to "
                "another folder, and score again"
            )
        pending = [record for record in records if record[:2] not in file.keys]
        yield len(records) - len(pending), len(records)
        for start in range(0, len(pending), _BATCH_SIZE):
            if stop():
                return
            part = pending[start : start + _BATCH_SIZE]
            values = verifier.values([(questions[key], text) for key, _, text in part])
            for (problem_id, index, _), steps in zip(part, values, strict=True):
                score = verifier.reduce_steps(steps)
                file.append(
                    {
                        "problem_id": problem_id,
                        "sample_index": index,
                        "score": score,
                        "steps": steps,
                        "by": by,
                    }
                )
            yield len(records) - len(pending) + start + len(part), len(records)
