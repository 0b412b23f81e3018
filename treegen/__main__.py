"""`python -m treegen`: the `treegen` command of this very Python."""

from treegen.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
