"""The `treegen` command, also as `python -m treegen`. A signal during startup ends it quietly."""

import signal


def main() -> int:
    """Run the command line; return the exit code of `treegen.cli.main.main`."""
    # Until handlers are installed, Ctrl-C would interrupt an import with a traceback, or be lost.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treegen.cli.main import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
