"""`treegen export` and `treegen import`: runs in the formats of other tools."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import PATH, QUIET, RUN, add_option_groups, option

# Copied from `treegen.report.exchange`, whose import is slow.
_FORMATS = ("inspect", "every-eval-ever", "lm-eval", "parquet")


class _Format(click.Choice[str]):
    """A format, whose error says how to write CSV."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a known format, or fail.

        Args:
            value: What the user passed.
            param: The option.
            ctx: The command's context.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            from treegen.report.exchange.export import suggest_frames

            self.fail(f"{error.message.rstrip('.')}{suggest_frames(str(value), 'RUN')}", param, ctx)


@click.command("export")
@RUN
@option(
    "--to FORMAT",
    "Format to write: inspect, every-eval-ever, lm-eval or parquet.",
    required=True,
    type=_Format(_FORMATS),
)
@option(
    "--output-path -o PATH",
    "File (.eval) for inspect, folder for other formats. Default: a path in the run directory.",
    type=PATH,
)
@add_option_groups("reading")
@QUIET
def export_to(run: Path, to: str, output_path: Path | None, **reading: Any) -> None:
    """Write the samples and scores of the directory RUN in the format of another tool.

    inspect writes an Inspect AI log, every-eval-ever the shared schema of that name, lm-eval the
    results and samples files of lm-evaluation-harness, and parquet tables.

    \f
    Args:
        run: The run directory.
        to: Name of the format.
        output_path: File (.eval) for inspect, folder for other formats.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.render import echo, exit_with_complaints, json_line, tell
    from treegen.common.formatting import format_bytes, safe_text
    from treegen.report.exchange.export import export_with_notices
    from treegen.report.view import UnscoredNotice

    files, notices = export_with_notices(run, to, output_path, **reading)
    unscored = [notice for notice in notices if isinstance(notice, UnscoredNotice)]
    for notice in notices:
        if notice not in unscored:
            tell(notice)
    for file in files:
        echo(safe_text(f"{file} ({format_bytes(file.stat().st_size)})"))
    json_line({"run": str(run), "to": to, "files": [str(file) for file in files]})
    exit_with_complaints(unscored)


@click.command("import")
@click.argument("log", type=PATH)
@option(
    "--output-path -o DIR",
    "Run directory, or the folder of the runs for several tasks. Default: a new one in runs/.",
    type=PATH,
)
@option("--task NAME", "Import only this task; may be repeated.", "tasks", multiple=True)
@QUIET
def import_log(log: Path, output_path: Path | None, tasks: tuple[str, ...]) -> None:
    """Convert LOG, another tool's log, to run directories for report, compare, score and show.

    LOG is an Inspect AI log, or results of lm-evaluation-harness with --log_samples: the folder,
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
