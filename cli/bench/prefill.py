"""`treegen bench prefill`: small prefill passes compared with their roofline."""

from dataclasses import asdict
from typing import Any

import click

from treegen.cli.bench.options import ENGINE, count, counts, shape_or_model
from treegen.cli.options.options import add_options, option


@click.command()
@option("--shape NAME", "Shape of a model with random weights, as in `treegen bench decode`.")
@counts("--tokens", "Tokens per pass.", default="8,64,128,256,512")
@count("--prefix", 1000, "Prompt tokens that are already in the cache.")
@count("--passes", 64, "Consecutive passes per run.")
@add_options(*ENGINE)
def prefill(
    shape: str | None,
    model: str | None,
    tokens: list[int],
    prefix: int,
    passes: int,
    *,
    repeats: int,
    **options: Any,
) -> None:
    """Time prefill passes over few tokens, as searches run them, against the roofline.

    \f
    Args:
        shape: Shape of a model with random weights, as in `treegen bench decode`.
        model: Checkpoint to use instead of --shape.
        tokens: Tokens per pass.
        prefix: Prompt tokens that are already in the cache.
        passes: Consecutive passes per run.
        repeats: Number of timed runs, after one untimed run.
        **options: Values of the options `ENGINE`.
    """
    shape = shape_or_model(shape, model, "llama3-8b")
    from treegen.bench import ceilings
    from treegen.bench.prefill import measure, pass_table
    from treegen.bench.shapes import load_or_build
    from treegen.bench.timing import describe_machine, headline
    from treegen.cli.terminal.render import echo, json_line, print_table
    from treegen.llm import LLM

    settings = {name: options[name] for name in ("memory", "eager", "reproducible")}
    loaded, tokenizer = load_or_build(
        shape, model, dtype=options["dtype"], device=options["device"]
    )
    rates = ceilings.measure(loaded.device, loaded.dtype, options["ceiling_seconds"])
    llm = LLM(loaded, tokenizer=tokenizer, **settings)
    machine = describe_machine(loaded.device)
    echo(f"{headline(machine)}, {loaded.spec.name}\n{rates}\n")
    times = list(measure(llm, rates, tokens, prefix=prefix, passes=passes, repeats=repeats))
    loaded.close()
    print_table(pass_table(times))
    results = [asdict(time) | {"times_floor": time.times_floor} for time in times]
    json_line(
        {
            "bench": "prefill",
            "machine": machine,
            "model": loaded.spec.name,
            "ceilings": asdict(rates),
            "settings": settings,
            "results": results,
        }
    )
