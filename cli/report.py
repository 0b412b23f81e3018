"""`treegen report` and `treegen watch`: runs as an HTML page, in a file or in a browser."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import PATH, QUIET, RUNS, add_option_groups, option


@click.command("report")
@RUNS
@option(
    "--output-path -o FILE.html",
    "HTML page to write. Default: report.html in the run; for several runs, in this directory.",
    type=PATH,
)
@add_option_groups("reading")
@option("--no-plots", "Write only the page, without a folder of plots.")
@QUIET
def report(
    runs: tuple[Path, ...], output_path: Path | None, no_plots: bool, **reading: Any
) -> None:
    """Write one HTML page about the directories RUN, with their results, samples and trees.

    The page needs no network and no other file. The plots are also written as SVG and PNG files.

    \f
    Args:
        runs: Run directories, or folders of them.
        output_path: HTML page to write.
        no_plots: Write only the page, without a folder of plots.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.render import echo, exit_with_complaints, in_flags, json_line, tell
    from treegen.common.formatting import format_bytes, safe_text
    from treegen.report.audit.audit import audit_quickly
    from treegen.report.html_page import check_name, write_page
    from treegen.report.load import find_runs, load_run
    from treegen.report.view import UnscoredNotice

    if output_path is not None and os.path.isdir(output_path):
        output_path = output_path / "report.html"
    if output_path is not None:
        check_name(output_path, "--output-path")
    paths, views, complaints = find_runs(runs), [], []
    for path in paths:
        view = load_run(path, **reading)
        for line in view.notices:
            if isinstance(line, UnscoredNotice):
                complaints.append(f"{path}: {in_flags(line)}")
            else:
                tell(f"{path}: {in_flags(line)}")
        views.append(view)
    default = paths[0] / "report.html" if len(paths) == 1 else Path("report.html")
    audits = [audit_quickly(view) for view in views]
    for audit in audits:
        if audit.failure is not None:
            tell(safe_text(audit.failure))
    page, *plots = write_page(views, output_path or default, plots=not no_plots, audits=audits)
    echo(f"page: {safe_text(str(page))} ({format_bytes(page.stat().st_size)})")
    for folder in sorted({plot.parent for plot in plots}):
        echo(f"plots: {safe_text(str(folder))}")
    json_line(
        {
            "page": str(page),
            "plots": [str(plot) for plot in plots],
            "runs": [str(path) for path in paths],
        }
    )
    exit_with_complaints(complaints)


@click.command("watch")
@RUNS
@option(
    "--port",
    "Port on 127.0.0.1; 0 takes a free port.",
    default=0,
    type=click.IntRange(0, 65535),
)
@option("--every SECONDS", "Minimum seconds between two reads of the runs.", default=5.0)
@add_option_groups("reading")
@QUIET
def watch(runs: tuple[Path, ...], port: int, every: float, **reading: Any) -> None:
    """Serve the page of `treegen report` to a browser on this machine, until Ctrl-C.

    The page follows the directories RUN while they grow. The command only reads the runs: it takes
    no lock and writes nothing.

    \f
    Args:
        runs: Run directories, or folders of them.
        port: Port on 127.0.0.1.
        every: Minimum seconds between two reads of the runs.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.errors import InputError
    from treegen.report.load import find_runs

    if not 1 <= every <= 86400:
        raise InputError(f"--every must be from 1 to 86400 seconds, got {every:g}")
    paths = find_runs(runs)
    from treegen.cli.terminal.render import echo, json_line
    from treegen.report.live_server import HOST, WatchedPage, make_server
    from treegen.runs import graceful_signals

    watched = WatchedPage(paths, options=reading, every=every)
    # Lower the priority of this process, because the runs come first.
    with suppress(OSError, AttributeError):
        os.nice(10)
    with graceful_signals() as stop, make_server(watched, port) as server:
        # Report runs that cannot be shown here rather than in the browser.
        watched.page()
        url = f"http://{HOST}:{server.server_port}/"
        echo(f"page: {url} (Ctrl-C stops the server)")
        json_line({"url": url, "runs": [str(path) for path in paths]})
        server.timeout = 0.2
        while not stop():
            server.handle_request()
