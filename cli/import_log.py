"""`treegen import`: convert another tool's log to run directories."""

from pathlib import Path

import click

from treegen.cli.options.options import PATH, QUIET, option


@click.command("import")
@click.argument("log", type=PATH)
@option(
    "--output-path -o DIR",
    "Run directory, or the folder of the runs for several tasks. Default: a new one in runs/.",
    type=PATH,
)
@option("--task NAME", "Import only this task; may be repeated.", "tasks", multiple=True)
@QUIET
def command(log: Path, output_path: Path | None, tasks: tuple[str, ...]) -> None:
    """Convert LOG, another tool's log, to run directories for report, compare, score and show.

    LOG is a log of Inspect AI, or results of lm-evaluation-harness with --log_samples: the folder,
    or its results_TIME.json. The runs keep the verdicts of the log.

    \f
    Args:
        log: The log of the other tool.
        output_path: Run directory, or the folder of the runs for several tasks.
        tasks: Tasks to import; none imports all.
    """
    from treegen.cli.terminal.render import echo, json_line, tell
    from treegen.common.formatting import safe_text
    from treegen.evals.pipeline.targets import new_path
    from treegen.report.exchange import read_log
    from treegen.report.exchange.external_log import make_runs

    logs = read_log(log, tasks or None)
    for part in logs:
        for line in part.notices:
            tell(f"{part.task}: {line}")
    if output_path is None:
        name = logs[0].task if len(logs) == 1 else log.stem
        output_path = new_path(name, "imported")
    runs = make_runs(logs, output_path)
    for part, run in zip(logs, runs, strict=True):
        echo(safe_text(f"{run}: {part.task}, {len(part.samples):,} samples of {part.model}"))
    json_line({"log": str(log), "runs": [str(run) for run in runs]})
