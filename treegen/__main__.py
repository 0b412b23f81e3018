"""The `treegen` command, also as `python -m treegen`. A signal during startup ends it quietly."""

import atexit
import os
import signal
import sys


def main() -> int:
    """Run the command line; return the exit code of `treegen.cli.main.main`."""
    # Until handlers are installed, Ctrl-C would interrupt an import with a traceback, or be lost.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    codes: list[int] = []
    if not atexit._ncallbacks():  # it must be the first function, so that it runs last
        atexit.register(_exit_early, codes)
    from treegen.common.lifetimes import raise_gc_threshold

    raise_gc_threshold()
    from treegen.cli.main import main as run

    try:
        codes.append(run())
    except SystemExit as done:  # click ends commands with it
        if not isinstance(done.code, int):
            raise
        codes.append(done.code)
    return codes[0]


def _exit_early(codes: list[int]) -> None:
    """End the process with a code; finalizing the modules of torch would take another second."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # Python reports it
        return
    if codes:
        os._exit(codes[0])


if __name__ == "__main__":
    raise SystemExit(main())
