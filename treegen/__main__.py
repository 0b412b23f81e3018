"""The `treegen` command, also as `python -m treegen`: a signal ends it quietly while it starts."""

import signal


def main() -> int:
    """Run the command line; returns the exit code, as `treegen.cli.main.main` does."""
    # Until there are handlers, Ctrl-C would end the imports with a traceback, or be lost in one.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treegen.cli.main import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
