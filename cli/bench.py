"""`treegen bench`: measure this machine, and print what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.group(name="bench")
def command() -> None:
    """Measure treegen on this machine."""


@command.command()
@click.option("--model", metavar="DIR", help="Checkpoint for the throughput part; default: a small "
              "one with random weights, made on the spot.")  # fmt: skip
@click.option("--samples", default=40, show_default=True, help="Samples per problem.")
@click.option("--problems", default=4, show_default=True, help="Problems.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens per sample.")
def engine(model: str | None, samples: int, problems: int, max_tokens: int) -> None:
    """Host time per decode step, pages in use, and tokens per second against transformers."""
    import torch

    from treegen.bench import engine as bench
    from treegen.cli.render import markdown

    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    click.echo(f"torch {machine['torch']}, {machine['threads']} threads, CPU\n")

    steps = list(bench.overhead(vocab_sizes=(32, 256)))
    click.echo("Host time of a decode step in which no row ends; the model's pass is free.")
    click.echo(
        markdown(
            ["Rows", "Vocabulary", "median ms", "90% ms"],
            [
                [f"{s.rows:,}", str(s.vocab_size), f"{s.median_ms:.3f}", f"{s.p90_ms:.3f}"]
                for s in steps
            ],
            [0, 1, 2, 3],
        )
    )
    memory = bench.memory()
    click.echo(
        f"\n{memory.problems:,} problems x {memory.samples // memory.problems} samples, 64 rows at "
        f"once: at most {memory.peak_pages} pages in use ({memory.peak_pages_first_tenth} within "
        f"the first tenth), {memory.pages_after} afterwards"
    )
    rows = list(bench.throughput(model, problems=problems, samples=samples, max_tokens=max_tokens))
    what = model or "a random 4-layer Llama of width 256"
    click.echo(f"\n{problems} problems x {samples} samples x {max_tokens} tokens, {what}")
    click.echo(
        markdown(
            ["Engine", "tokens/s", "seconds", "prompt tokens"],
            [
                [r.name, f"{r.tokens_per_second:,.0f}", f"{r.seconds:.2f}", f"{r.prompt_tokens:,}"]
                for r in rows
            ],
            [1, 2, 3],
        )
    )
    document = {
        "machine": machine,
        "overhead": [asdict(s) for s in steps],
        "memory": asdict(memory),
        "throughput": [asdict(r) for r in rows],
    }
    click.echo(json.dumps(document))
