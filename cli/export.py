"""`treegen export`: a run in the format of another tool."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import PATH, QUIET, RUN, add_option_groups, option

# Copied from `treegen.report.exchange`, whose import is slow.
_FORMATS = ("inspect", "every-eval-ever", "lm-eval", "parquet")


@click.command("export")
@RUN
@option(
    "--to FORMAT",
    "Format to write: inspect, every-eval-ever, lm-eval or parquet.",
    required=True,
    type=click.Choice(_FORMATS),
)
@option(
    "--output-path -o PATH",
    "File (.eval) for inspect, folder for other formats. Default: a place in the run.",
    type=PATH,
)
@add_option_groups("reading")
@QUIET
def command(run: Path, to: str, output_path: Path | None, **reading: Any) -> None:
    """Write the samples and scores of the directory RUN in the format of another tool.

    inspect writes a log of Inspect AI, every-eval-ever the shared schema of that name, lm-eval the
    results and samples files of lm-evaluation-harness, and parquet tables.

    \f
    Args:
        run: The run directory.
        to: Name of the format.
        output_path: File (.eval) for inspect, folder for other formats.
        **reading: Options of the group "reading", as for `load_run`.
    """
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import safe_text
    from treegen.report.exchange import export_run

    files = export_run(run, to, output_path, **reading)
    for file in files:
        echo(safe_text(f"{file} ({file.stat().st_size / 2**20:,.1f} MiB)"))
    json_line({"run": str(run), "to": to, "files": [str(file) for file in files]})
