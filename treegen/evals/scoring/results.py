"""Writing of results.json: the settings of a run, its usage and its report."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from treegen.common.lifetimes import pause_gc
from treegen.evals.config.eval_settings import REPORTED, stored_choices
from treegen.evals.job import AnyJob, Job
from treegen.evals.progress.usage import load_attempts, sum_usage
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.run_verdicts import RunVerdicts
from treegen.evals.scoring.samples import aggregate, restore_rounds, rounds_of, score_samples
from treegen.evals.scoring.vote_tables import VoteInputs
from treegen.evals.statistics.metrics import Report
from treegen.evals.thinking import ThinkingTokens
from treegen.evals.verdict import SampleScore
from treegen.runs import RunDir


def write_results(
    job: Job,
    run: RunDir,
    program_scoring: ProgramScoring | None = None,
    verdicts: RunVerdicts | None = None,
) -> tuple[dict[str, Any], Report | None]:
    """Write results.json from the samples of a run.

    Args:
        job: The job of the run.
        run: The run.
        program_scoring: The verdicts on programs; None if samples are not programs, or not scored.
        verdicts: The verdicts that are known.

    Returns:
        The content of results.json and the report, as from `build_results`.
    """
    results, report = build_results(job, run, program_scoring, verdicts)
    run.write_results(results)
    return results, report


@pause_gc()
def build_results(
    job: Job,
    run: RunDir,
    program_scoring: ProgramScoring | None = None,
    verdicts: RunVerdicts | None = None,
    *,
    rescore: bool = False,
) -> tuple[dict[str, Any], Report | None]:
    """Return the content of results.json for the samples of a run, and the report.

    The report is None if samples are not scored, or are programs and `program_scoring` is None.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        program_scoring: The verdicts on programs; None if samples are not programs, or not scored.
        verdicts: The verdicts that are known.
        rescore: Whether to score all samples, including those with cached verdicts.
    """
    unjudged = job.task.executes_code and program_scoring is None
    report = None
    totals = _Totals()
    if job.settings.score and not unjudged:
        scores: list[SampleScore] = []

        def on_sample(record: dict[str, Any], score: SampleScore | None) -> None:
            totals.add(record)
            if score is not None:
                scores.append(score)

        rounds = rounds_of(job)
        score_samples(
            job,
            run,
            on_sample,
            program_scoring=program_scoring,
            rounds=rounds,
            rescore=rescore,
            verdicts=verdicts,
        )
        report = aggregate(job, scores, rounds, VoteInputs.of(run.path))
    else:
        rounds = restore_rounds(job, run)
        for record in run.records():
            totals.add(record)
    parts = load_attempts(run)
    task_fields = {"label": job.data.label, "notes": list(job.data.notes)}
    choices = stored_choices(run.info)
    reported = {name: getattr(job.settings, name) for name in REPORTED}
    if not (job.settings.pass_hat_ks or choices.get("pass_hat_ks")):
        del reported["pass_hat_ks"]
    results = {
        **results_head(job, run, {**choices, **reported}, **task_fields),
        "shortened": totals.shortened,
        "usage": sum_usage(
            parts,
            num_samples=len(run.done),
            unshared=totals.unshared,
            sample_tokens=totals.sample_tokens,
        ),
        "report": report.to_json() if report else None,
        "parts": parts,
    }
    if rounds:
        results["stopping"] = rounds.to_json()
    if thinking := totals.tokens.summary():
        results["thinking"] = thinking
    if program_scoring:
        results["judging"] = program_scoring.summary()
    return results, report


class _Totals:
    """Sums over stored samples."""

    def __init__(self) -> None:
        self.tokens = ThinkingTokens()
        self.shortened = self.unshared = self.sample_tokens = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self.tokens.add(record)
        self.shortened += "dropped" in record
        self.unshared += record["prompt_tokens"] + record.get("choice_tokens", 0)
        self.sample_tokens += record["num_tokens"]


def results_head(
    job: AnyJob, run: RunDir, choices: Mapping[str, Any], **of_task: Any
) -> dict[str, Any]:
    """Return the first fields of results.json, for a run of any kind.

    Args:
        job: The job of the run.
        run: The run.
        choices: The settings that the user chose, by name.
        **of_task: Further fields of "task".
    """
    info, source = run.info, job.data.source
    return {
        "complete": run.missing == 0,
        "planned": info.planned,
        "done": len(run.done),
        "task": {"name": job.task.name, "version": job.task.version, "source": source, **of_task},
        "model": dict(info.identity["model"]),
        "settings": dict(choices),
        "fingerprint": info.fingerprint,
        "versions": dict(info.versions),
        "skipped": [asdict(row) for row in job.data.skipped],
    }
