"""`treegen watch`: the page of running runs, in a browser on this machine."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import QUIET, RUNS, add_option_groups, option


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
def command(runs: tuple[Path, ...], port: int, every: float, **reading: Any) -> None:
    """Serve the page of `treegen report` to a browser on this machine, until Ctrl-C.

    The page follows the directories RUN while they grow. The command only reads the runs: it takes
    no lock and writes nothing.

    \f
    Args:
        runs: Run directories, or folders of them.
        port: Port on 127.0.0.1.
        every: Minimum seconds between two reads of the runs.
        **reading: Options of the group "reading", as for `load_run`.
    """
    from treegen.errors import InputError
    from treegen.report.load import find_runs

    if not 1 <= every <= 86400:
        raise InputError(f"--every must be from 1 to 86400 seconds, got {every:g}")
    paths = find_runs(runs)
    from treegen.cli.terminal.render import echo, json_line
    from treegen.report.live_server import HOST, WatchedPage, make_server
    from treegen.runs import graceful_signals

    watched = WatchedPage(paths, asked=reading, every=every)
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
