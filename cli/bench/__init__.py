"""`treegen bench`: measure this machine, and print the measurements."""

import click

from treegen.cli.bench.attention import attention
from treegen.cli.bench.cluster import cluster
from treegen.cli.bench.decode import decode
from treegen.cli.bench.prefill import prefill


@click.group(name="bench")
def command() -> None:
    """Measure treegen's speed on this machine."""


for _part in (attention, decode, prefill, cluster):
    command.add_command(_part)
