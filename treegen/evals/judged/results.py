"""Write results.json: what a run is, what it cost, and its report."""

from collections.abc import Mapping
from typing import Any

from treegen.common.uncollected import uncollected
from treegen.evals.asked.settings import stored_choices
from treegen.evals.course.account import add_up, stored_parts
from treegen.evals.job import AnyJob, Job
from treegen.evals.judged.execution import Judging, executing
from treegen.evals.judged.scoring import aggregate, judged, look_back, rounds_of, score_of
from treegen.evals.judged.vote_tables import Votes
from treegen.evals.statistics.metrics import Report
from treegen.evals.thinking import ThinkingTokens
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs import RunDir


def write_results(
    job: Job, run: RunDir, judging: Judging | None = None
) -> tuple[dict[str, Any], Report | None]:
    """Write results.json from the samples of a run; returns what `results_of` does."""
    results, report = results_of(job, run, judging)
    run.write_results(results)
    return results, report


@uncollected()
def results_of(
    job: Job, run: RunDir, judging: Judging | None = None, *, anew: bool = False
) -> tuple[dict[str, Any], Report | None]:
    """Return the content of results.json for the samples of a run, and the report.

    The report is None if samples are not scored, or are programs that are not judged.

    anew: whether samples are judged whose verdicts are kept.
    """
    unjudged = executing(job.task) is not None and judging is None
    report = None
    totals = _Totals()
    if job.settings.score and not unjudged:
        problems = {problem.id: problem for problem in job.data.problems}

        scores: list[SampleScore] = []

        def look(record: dict[str, Any], verdicts: Mapping[str, Verdict] | None) -> None:
            totals.add(record)
            if verdicts is not None:
                scores.append(score_of(job, problems[record["problem_id"]], record, verdicts))

        rounds = rounds_of(job)
        judged(job, run, look, judging=judging, rounds=rounds, anew=anew)
        report = aggregate(job, scores, rounds, Votes.of(run.path))
    else:
        rounds = look_back(job, run)
        for record in run.records():
            totals.add(record)
    parts = stored_parts(run)
    told = {"label": job.data.label, "notes": list(job.data.notes)}
    results = {
        **results_head(job, run, stored_choices(run.info), **told),
        "shortened": totals.shortened,
        "usage": add_up(
            parts, num_samples=len(run.done), unshared=totals.unshared, kept=totals.kept
        ),
        "report": report.to_json() if report else None,
        "parts": parts,
    }
    if rounds:
        results["stopping"] = rounds.told()
    if thinking := totals.tokens.summary():
        results["thinking"] = thinking
    if judging:
        results["judging"] = judging.summary()
    return results, report


class _Totals:
    """Sums over stored samples."""

    def __init__(self) -> None:
        self.tokens = ThinkingTokens()
        self.shortened = self.unshared = self.kept = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self.tokens.add(record)
        self.shortened += "dropped" in record
        self.unshared += record["prompt_tokens"] + record.get("choice_tokens", 0)
        self.kept += record["num_tokens"]


def results_head(
    job: AnyJob, run: RunDir, choices: Mapping[str, Any], **of_task: Any
) -> dict[str, Any]:
    """Return the first fields of results.json, for a run of any kind. of_task: more on the task."""
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
        "skipped": [
            {"source": row.source, "line": row.line, "reason": row.reason}
            for row in job.data.skipped
        ],
    }
