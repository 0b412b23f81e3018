"""Score a checkpoint with treegen: `python -m train_demo.evaluate OUT`, from the folder examples/.

The problems are the bundled ones, which training never sees. Runs with every sample are left in
OUT/runs; `treegen show` and `treegen report` look into them.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from treegen.cli.main import cli
from treegen.demo import NAME, fill_defaults

# Tasks and how many samples each problem gets. Programs are left out: they run only where asked.
TASKS: Final = {"gsm8k": 8, "needle": 1, "countdown": 8}


def command_lines(checkpoint: Path, limit: int) -> Iterator[list[str]]:
    """Yield the arguments of `treegen` that score a checkpoint on `limit` problems of each task."""
    runs = checkpoint / "runs" / time.strftime("%Y%m%d-%H%M%S")
    for task, samples in TASKS.items():
        arguments = fill_defaults({"task": task})
        assert arguments.pop("model") == NAME
        yield [
            "eval",
            task,
            "--model",
            str(checkpoint),
            "--limit",
            str(limit),
            "--n-samples",
            str(samples),
            "--output-path",
            str(runs / task),
            *(
                f"--{name.replace('_', '-')}={arguments[name]}"
                for name in ("data", "fewshot_file")
                if name in arguments
            ),
            *(f"--task-arg={name}={value}" for name, value in arguments.get("extra", {}).items()),
        ]


def evaluate(checkpoint: Path, limit: int) -> None:
    """Score a checkpoint, and print what `treegen eval` prints."""
    for arguments in command_lines(checkpoint, limit):
        print(f"\n$ treegen {' '.join(arguments)}", flush=True)
        cli.main(arguments, standalone_mode=False)


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--limit", default=40, show_default=True, help="Problems of each task.")
def main(checkpoint: Path, limit: int) -> None:
    """Score the model in CHECKPOINT."""
    evaluate(checkpoint, limit)


if __name__ == "__main__":
    main()
