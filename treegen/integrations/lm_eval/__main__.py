"""`python -m treegen.integrations.lm_eval`: lm-eval's command line with `--model treegen`."""

import sys

import click
from lm_eval.__main__ import cli_evaluate

from treegen.common.formatting import safe_text
from treegen.errors import TreegenError


def main() -> int:
    """Run lm-eval's command line; return the exit code, which is 2 for a TreegenError."""
    try:
        cli_evaluate()
    except TreegenError as error:
        click.echo(f"Error: {safe_text(' '.join(str(error).split()))}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
