"""`treegen audit`: find problems that may make the scores of finished runs misleading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import make_execution, pop_reading
from treegen.cli.options.options import PATH, QUIET, RUNS, add_option_groups, option
from treegen.report.audit import SEVERITIES


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
    runs the reference solutions of tasks with programs only with --allow-code-execution. If a run
    cannot be read, the audit goes on with the others, and the exit code is 2.

    \f
    Args:
        runs: Run directories, or folders of them.
        fail_on: Least severity of a finding that makes the exit code 1.
        faulty_items: File of ids of faulty problems, one in each line.
        **params: Options of the "reading" (see `load_run`) and "execution" option groups.
    """
    from treegen.cli.terminal.render import echo, exit_with_complaints, in_flags, json_line
    from treegen.common.formatting import safe_text
    from treegen.errors import TreegenError
    from treegen.report.audit.audit import audit_view
    from treegen.report.audit.data_checks import read_faulty_ids
    from treegen.report.load import find_runs, load_run

    execution = make_execution(params)
    reading = pop_reading(params)
    faulty = None if faulty_items is None else read_faulty_ids(faulty_items)
    audits, errors = [], {}
    for path in find_runs(runs):
        name = safe_text(str(path))
        try:
            audit = audit_view(load_run(path, **reading), faulty=faulty, execution=execution)
        except TreegenError as error:
            errors[name] = safe_text(in_flags(error.message))
            continue
        audit = replace(audit, notices=tuple(map(in_flags, audit.notices)))
        audits.append(audit)
        echo(f"{name}\n")
        echo(f"{audit}\n")
    unread = [{"run": name, "error": error} for name, error in errors.items()]
    json_line({"audits": [audit.to_json() for audit in audits], "unread": unread})
    bad = [audit for audit in audits if fail_on is not None and audit.has(fail_on)]
    complaints = [safe_text(f"{audit.run}: {audit.summary}") for audit in bad]
    complaints += [error if name in error else f"{name}: {error}" for name, error in errors.items()]
    exit_with_complaints(complaints, code=2 if errors else 1)
