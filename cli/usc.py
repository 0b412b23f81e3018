"""`treegen usc`: the model picks the most consistent of its samples, problem by problem."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treegen.cli.interrupts import Interrupted, received
from treegen.cli.options import CONTEXT, QUIET

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.runs import RunInfo


@click.command("usc", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--most", type=click.IntRange(min=1), metavar="N", help="Show the model the first N "
              "samples of a problem. Default: all.")  # fmt: skip
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@QUIET
def command(run: Path, most: int | None, data: str | None, quiet: bool) -> None:
    """Let the model of RUN pick the most consistent sample of each problem.

    This is universal self-consistency: the run's samples are shown to the model that drew them. A
    pick is stored as it comes, and a command that was stopped goes on when it is given again.
    `treegen score RUN --votes usc` then reports the picks beside maj@k.
    """
    from treegen.cli.render import echo, json_line, notice
    from treegen.cli.work import either, load
    from treegen.errors import RunError
    from treegen.evals.judged.consistency import pick, questions_of
    from treegen.runs import RunDir, graceful_signals

    with RunDir.open(run) as opened:
        for line in opened.notices:
            notice(line)
        job = stored_job(run, opened.info, data)
        questions_of(job, opened, most)  # what cannot be asked is refused before a model is loaded
        engine = job.settings.engine
        if not quiet:
            notice(f"loading {engine.model}")
        llm = load(engine, opened.info.identity["model"]["fingerprint"])
        done = planned = 0
        with graceful_signals() as graceful:
            stop = either(received, graceful)
            for so_far in pick(job, opened, llm, most=most, stop=stop):
                done, planned = so_far
            if signum := stop():
                raise Interrupted(
                    signum, f"{done:,} of {planned:,} picks are kept; give the command again"
                )
        if done < planned:
            raise RunError(f"{planned - done:,} picks are missing; give the command again")
    if not quiet:
        echo(f"{done:,} problems have a pick; report them with: treegen score {run} --votes usc")
    json_line({"run": str(run), "picks": done})


def stored_job(run: Path, info: "RunInfo", data: str | None) -> "Job":
    """Return the job of a stored run, to be scored."""
    from treegen.evals.asked.settings import settle, stored_choices
    from treegen.evals.identity import check_same_data
    from treegen.evals.job import load_job

    stored = {**stored_choices(info), "score": True}
    job = load_job(settle({} if data is None else {"data": data}, stored))
    check_same_data(job, info.identity, str(run))
    return job
