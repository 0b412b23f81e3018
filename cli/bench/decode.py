"""`treegen bench decode` and `treegen bench prefill`: whole passes, against the roofline."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treegen.bench.workloads import DECODE_MODES, NO_ATTENTION, TIME_LIMIT, Case, decode_cases
from treegen.cli.bench.options import (
    ENGINE,
    RUNS,
    int_list_option,
    int_option,
    name_list_option,
    shape_or_model,
)
from treegen.cli.options.options import add_options, option
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.bench.decode import Bench, WorkloadResult
    from treegen.model.model import Model


@click.command()
@option(
    "--shape NAME",
    "Shape of a model with random weights: llama2-7b, llama3-8b, llama3-70b, llama3.2-1b, "
    "qwen3-4b, qwen3.5-4b, qwen3.5-9b, qwen3.6-35b-a3b, codellama-7b, codellama-13b, yi-6b, "
    "granite-4.0-h-micro, deepseek-v2-lite, glm-4.7-flash, tiny, tiny-delta, tiny-mamba2 or "
    "tiny-mla.",
)
@int_list_option("--rows", "Samples decoded at once. Default: 1024.")
@int_list_option("--prefix", "Prompt tokens that all rows share. Default: 2048.")
@int_option(
    "--problems", 1, "Number of problems below the prefix; the rows are divided among them."
)
@int_option("--problem-tokens", 0, "Tokens of each problem.", minimum=0)
@int_option("--new-tokens", 64, "Tokens of each sample.", minimum=2)
@name_list_option("--modes", DECODE_MODES, "Sharing modes to time: all, one, off, no-attention.")
@option(
    "--refill",
    "Draw 8 samples per row with random lengths, --new-tokens on average; new samples replace "
    "finished ones.",
)
@add_options(*RUNS)
def decode(
    shape: str | None,
    rows: list[int] | None,
    prefix: list[int] | None,
    modes: tuple[str, ...] | None,
    new_tokens: int,
    *,
    problems: int,
    problem_tokens: int,
    refill: bool,
    **options: Any,
) -> None:
    """Time decoding with all, one or no prefix levels shared, and without attention.

    The command compares the measured times with the roofline.

    \f
    Args:
        shape: Name of the shape of a model with random weights; None for a checkpoint.
        rows: Samples decoded at once.
        prefix: Prompt tokens that all rows share.
        modes: Sharing modes to time.
        new_tokens: Tokens of each sample.
        problems: Number of problems below the prefix, which divide the rows.
        problem_tokens: Tokens of each problem.
        refill: Whether new samples replace finished ones.
        **options: Values of the options `RUNS`.
    """
    if modes == ():
        raise InputError(f"--modes is empty; choose from {', '.join(DECODE_MODES)}")
    if refill and options["model"]:
        raise InputError("--refill needs a model with random weights; remove --model")
    if modes is None:
        modes = DECODE_MODES if options["ranks"] == 1 else DECODE_MODES[:-1]
    cases = decode_cases(
        rows or [1024],
        prefix or [2048],
        new_tokens,
        problems=problems,
        problem_tokens=problem_tokens,
        modes=modes,
        refill=refill,
    )
    shape = shape_or_model(shape, options["model"], "llama3-8b")
    _, document = run_cases(cases, shape, options)
    from treegen.cli.terminal.render import json_line

    json_line({"bench": "decode", **document})


def run_cases(
    cases: Sequence[Case],
    shape: str | None,
    options: Mapping[str, Any],
    *,
    title: str = "",
    bench_type: "type[Bench] | None" = None,
) -> "tuple[list[WorkloadResult], dict[str, Any]]":
    """Measure cases on a shape or a checkpoint, and print the results.

    Args:
        cases: The workloads and their modes.
        shape: The shape of a model with random weights; None for the checkpoint in the options.
        options: The values of the options `RUNS`.
        title: Text printed before the description of the machine.
        bench_type: The class that measures. Default: `Bench`.

    Returns:
        The results, and the same with their settings as JSON.
    """
    check_runs(cases, options)
    from treegen.bench.shapes import load_or_build

    names = ("dtype", "device", "ranks", "quantization", "kv_cache_dtype")
    load_options = {name: options[name] for name in names}
    model, tokenizer = load_or_build(shape, options["model"], **load_options)
    return measure_cases(cases, model, tokenizer, options, title=title, bench_type=bench_type)


def check_runs(cases: Sequence[Case], options: Mapping[str, Any]) -> None:
    """Raise InputError for options that do not go together.

    Args:
        cases: The workloads and their modes.
        options: The values of the options `RUNS`.
    """
    from treegen.model.options import EngineOptions

    if options["ranks"] > 1 and any(NO_ATTENTION in case.modes for case in cases):
        raise InputError("--tp supports only the modes all, one and off; remove the other modes")
    EngineOptions(
        model="",
        quantization=options["quantization"],
        tensor_parallel_size=options["ranks"],
        kv_cache_dtype=options["kv_cache_dtype"],
        reproducible=options["reproducible"],
    )


def measure_cases(
    cases: Sequence[Case],
    model: "Model",
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    title: str = "",
    note: str = "",
    bench_type: "type[Bench] | None" = None,
) -> "tuple[list[WorkloadResult], dict[str, Any]]":
    """Measure cases on a model, and print the results. The model is closed.

    Args:
        cases: The workloads and their modes.
        model: The model.
        tokenizer: Its tokenizer.
        options: The values of the options `RUNS`.
        title: Text printed before the description of the machine.
        note: Text printed after the name of the model.
        bench_type: The class that measures. Default: `Bench`.

    Returns:
        The results, and the same with their settings as JSON.
    """
    from treegen.bench import ceilings
    from treegen.bench.decode import Bench, Settings
    from treegen.bench.table import result_line, results_table
    from treegen.bench.timing import describe_machine, headline
    from treegen.cli.terminal.render import echo, notice, print_table

    ranks, quantization = options["ranks"], options["quantization"]
    rates = ceilings.measure(
        model.device, model.dtype, options["ceiling_seconds"], fp8=quantization == "fp8"
    )
    notes = [
        f" on {ranks} GPUs" if ranks > 1 else "",
        f" in {quantization}" if quantization else "",
        ", keys and values in fp8" if options["kv_cache_dtype"] == "fp8" else "",
        note,
    ]
    machine = describe_machine(model.device)
    echo(f"{title}{headline(machine)}, {model.spec.name}{''.join(notes)}\n{rates}\n")
    names = ("repeats", "memory", "eager", "reproducible")
    settings = Settings(
        time_limit=options["time_limit"] or TIME_LIMIT, **{name: options[name] for name in names}
    )
    bench = (bench_type or Bench)(model, tokenizer, rates, settings)
    results = []
    for result in bench.measure(cases):
        notice(result_line(result))
        results.append(result)
    bench.close()
    model.close()
    print_table(results_table(results))
    return results, {
        "tensor_parallel_size": ranks,
        "quantization": quantization,
        "kv_cache_dtype": options["kv_cache_dtype"],
        "machine": machine,
        "model": model.spec.name,
        "weights": "checkpoint" if options["model"] else "random",
        "ceilings": asdict(rates),
        "settings": asdict(settings),
        "results": [asdict(result) for result in results],
    }


@click.command()
@option("--shape NAME", "Shape of a model with random weights, as in `treegen bench decode`.")
@int_list_option("--tokens", "Tokens per forward pass.", default="8,64,128,256,512")
@int_option("--prefix", 1000, "Prompt tokens that are already in the cache.")
@int_option("--passes", 64, "Consecutive passes per run.")
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
            "ceilings": rates,
            "settings": settings,
            "results": results,
        }
    )
