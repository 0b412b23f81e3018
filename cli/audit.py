"""`treegen audit`: a second opinion on the score of finished runs."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import make_execution, pop_reading
from treegen.cli.options.options import PATH, QUIET, RUNS, add_option_groups, option
from treegen.report.audit.kinds import SEVERITIES


@click.command("audit")
@RUNS
@add_option_groups("reading", "execution")
@option(
    "--fail-on SEVERITY",
    "Exit with code 1 if a finding has at least this severity: high, medium or low.",
    type=click.Choice(SEVERITIES),
)
@option("--faulty-items FILE", "Ids of faulty problems, one per line.", type=PATH)
@QUIET
def command(
    runs: tuple[Path, ...], fail_on: str | None, faulty_items: Path | None, **params: Any
) -> None:
    """Find problems that may make the scores of the directories RUN misleading.

    The audit reads the answers again by the rules of other tools, and checks prompts, samples and
    data. Each finding has a severity, a count, an example and advice. The audit runs no model. It
    runs the reference solutions of tasks with programs only with --allow-code-execution.

    \f
    Args:
        runs: Run directories, or folders of them.
        fail_on: Least severity of a finding that makes the exit code 1.
        faulty_items: File of ids of faulty problems, one in each line.
        **params: Options of the "reading" (see `load_run`) and "execution" option groups.
    """
    from treegen.cli.terminal.render import echo, exit_with_complaints, json_line
    from treegen.common.formatting import safe_text
    from treegen.report.audit.audit import audit_run
    from treegen.report.load import find_runs

    execution = make_execution(params)
    reading = pop_reading(params)
    audits = []
    for path in find_runs(runs):
        audits.append(audit_run(path, faulty_items=faulty_items, execution=execution, **reading))
        echo(f"{safe_text(str(path))}\n")
        echo(f"{audits[-1]}\n")
    json_line({"audits": [audit.to_json() for audit in audits]})
    bad = [audit for audit in audits if fail_on is not None and audit.has(fail_on)]
    exit_with_complaints([safe_text(f"{audit.run}: {audit.summary}") for audit in bad])
