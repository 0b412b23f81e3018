"""The subcommands of `treegen bench` that compare the engine with the device's limits."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.bench.decoding.modes import ALONE, DECODE_MODES, GRID_SECONDS, SECONDS, STOCK_MODES
from treegen.cli.bench.options import ENGINE, bounded_option, count, counts, shape_or_model
from treegen.cli.options.options import Decorator, add_options
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.bench.decoding.decode_options import DecodeOptions
    from treegen.bench.decoding.result import WorkloadResult
    from treegen.bench.decoding.workloads import Case


def _some_of(flag: str, known: tuple[str, ...], told: str, **how: Any) -> Decorator:
    """Return the option of a comma-separated list of known names.

    Args:
        flag: The name of the option.
        known: The allowed names.
        told: Its help text.
        how: Further arguments of `click.option`.
    """

    def check(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...] | None:
        if text is None:
            return None
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in known:
                raise InputError(f"{flag} must be some of {', '.join(known)}, got {name!r}")
        return tuple(dict.fromkeys(names))

    return click.option(flag, metavar="NAME,...", help=told, callback=check, **how)


def _is_share(value: float) -> bool:
    return 0 < value <= 1


_MODEL: Final = (
    bounded_option(
        "--time-limit",
        lambda seconds: seconds > 0,
        "above 0",
        type=float,
        metavar="S",
        help="Leave out what takes at least so many seconds a run. "
        f"Default: {SECONDS:g}, of a grid {GRID_SECONDS:g}.",
    ),
    count(
        "--tensor-parallel-size",
        1,
        "GPUs that compute together, each with a part of every "
        "layer. The roofline is theirs together.",
        "--tp",
        "ranks",
        metavar="N",
    ),
    click.option(
        "--quantization",
        metavar="TYPE",
        help="fp8: matrices in 8 bits; mxfp4: experts of a gpt-oss shape in 4 bits.",
    ),
    click.option(
        "--kv-cache-dtype", default="auto", metavar="TYPE", help="fp8: keys and values in 8 bits."
    ),
    _some_of(
        "--against",
        STOCK_MODES,
        "Engines of transformers to time as well: generate, continuous.",
        default="",
    ),
    *ENGINE,
)
_PARTS: Final = (
    click.option(
        "--shape",
        metavar="NAME",
        help="Random weights of this shape; default: by experiment, see the output.",
    ),
    bounded_option(
        "--scale",
        _is_share,
        "above 0 and at most 1",
        default=0.1,
        show_default=True,
        help="Share of the problems to run.",
    ),
    bounded_option(
        "--length-scale",
        _is_share,
        "above 0 and at most 1",
        default=1.0,
        show_default=True,
        help="Multiply all lengths, to try a command out.",
    ),
    *_MODEL,
)


@click.command()
@click.option(
    "--shape",
    metavar="NAME",
    help="Random weights of this shape: llama2-7b, llama3-8b, "
    "llama3-70b, llama3.2-1b, qwen3-4b, qwen3.5-4b, qwen3.5-9b, qwen3.6-35b-a3b, "
    "codellama-7b, codellama-13b, yi-6b, granite-4.0-h-micro, deepseek-v2-lite, "
    "glm-4.7-flash, tiny, tiny-delta, tiny-mamba2 or tiny-mla; with --image-tokens "
    "qwen3-vl-4b, qwen3-vl-8b or tiny-vl.",
)
@counts("--rows", "Samples decoded at once. Default: 1024.")
@counts("--prefix", "Prompt tokens that all share. Default: 2048.")
@count("--problems", 1, "Divide the rows among so many problems below the prefix.")
@count("--problem-tokens", 0, "Tokens of each problem.", least=0)
@count(
    "--image-tokens",
    0,
    "The prefix begins with an image of about so many tokens.",
    least=0,
    metavar="N",
    show_default=False,
)
@count("--new-tokens", None, "Tokens of each sample. Default: 64, with --grid 16.", least=2)
@_some_of("--modes", DECODE_MODES, "Some of all, one, off and no-attention.")
@click.option(
    "--grid",
    is_flag=True,
    help="Sharing as the engine chooses it against none, for "
    "prefixes of 64 to 16,384 tokens and 1 to 4,096 rows.",
)
@click.option(
    "--refill",
    is_flag=True,
    help="Samples end at random, --new-tokens long on average, "
    "and others take their places: 8 times as many as rows.",
)
@click.option(
    "--speculate",
    is_flag=True,
    help="Guessed tokens against none, where rows are given "
    "the tokens of recorded samples. Default: 16, 64 and 1024 rows, a prefix of "
    "1000.",
)
@count(
    "--own-tokens",
    0,
    "With --speculate: prompt tokens that each sample has for itself.",
    least=0,
    metavar="N",
    show_default=False,
)
@click.option(
    "--trace",
    metavar="FILE",
    help="With --speculate: other recorded samples, as JSON "
    "{source, prompts, samples} of token ids.",
)
@click.option(
    "--own-states",
    is_flag=True,
    help="Of a model with recurrent layers: also where "
    "each row reads and writes a state of its own.",
)
@click.option(
    "--structured", is_flag=True, help="Also where every sample has to be JSON of a schema."
)
@add_options(*_MODEL)
def decode(shape: str | None, **params: Any) -> None:
    """End to end: every level shared, one, none, and no attention at all, against the roofline."""
    from treegen.bench.decoding.decode_options import DecodeOptions

    asked = DecodeOptions(**{each.name: params.pop(each.name) for each in fields(DecodeOptions)})
    names = ("image_tokens", "quantization", "ranks", "model")
    asked.check(**{name: params[name] for name in names})
    if asked.speculate:
        _speculate(shape, asked, params)
        return
    cases = asked.cases(params["ranks"])
    if params["time_limit"] is None:
        params["time_limit"] = asked.seconds
    usual = "qwen3-vl-4b" if params["image_tokens"] else "llama3-8b"
    results, document = _run(cases, shape, usual, params)
    from treegen.cli.terminal import render

    if asked.grid:
        from treegen.bench.suite import tell_ratios

        document["never_slower"] = tell_ratios(render, results)
    render.json_line({"bench": "grid" if asked.grid else "decode", **document})


def _speculate(shape: str | None, asked: "DecodeOptions", options: dict[str, Any]) -> None:
    """Time jobs of recorded samples without speculation and with it."""
    known = shape_or_model(shape, options["model"], "llama3-8b")
    from treegen.bench.suite import time_guesses
    from treegen.cli.terminal import render

    kind = {name: options[name] for name in ("dtype", "device", "ranks", "quantization")}
    made = {name: options[name] for name in ("memory", "eager", "reproducible")}
    render.json_line(
        time_guesses(
            render,
            known,
            options["model"],
            asked.trace,
            rows=asked.rows or [16, 64, 1024],
            prefixes=asked.prefix or [1000],
            own_tokens=asked.own_tokens,
            repeats=options["repeats"],
            kind=kind,
            made=made,
        )
    )


@click.command()
@click.argument("names", nargs=-1, metavar="[EXPERIMENT]...")
@add_options(*_PARTS)
def paper(names: tuple[str, ...], **options: Any) -> None:
    """Jobs after the Hydragen paper's experiments: tables, needle, apps, gsm8k, mmlu, or all."""
    from treegen.bench.decoding.experiments import PAPER

    _experiments(names or PAPER, **options)


@click.command()
@add_options(*_PARTS)
def monkeys(**options: Any) -> None:
    """A job like GSM8K, 1,024 samples for each of 128 problems, on the shape of Llama-3.2-1B."""
    _experiments(("monkeys",), **options)


def _experiments(
    names: tuple[str, ...],
    scale: float,
    length_scale: float,
    shape: str | None,
    against: tuple[str, ...],
    **options: Any,
) -> None:
    from treegen.bench.decoding.experiments import cases_of, get_experiment

    if options["time_limit"] is None:
        options["time_limit"] = SECONDS
    experiments = [get_experiment(name) for name in names]
    from treegen.cli.terminal.render import echo, json_line

    documents = []
    for each in experiments:
        cases = cases_of(each, scale=scale, lengths=length_scale, against=against)
        _, document = _run(cases, shape, each.shape, options, each.heading(scale))
        about = {"experiment": each.name, "scale": scale, "length_scale": length_scale}
        documents.append({**about, "chosen_here": each.chosen, **document})
        echo("")
    json_line({"bench": "paper", "experiments": documents})


def _run(
    cases: "list[Case]", shape: str | None, default: str, options: dict[str, Any], title: str = ""
) -> "tuple[list[WorkloadResult], dict[str, Any]]":
    """Measure cases on a shape or a checkpoint, print a table, and return the results."""
    from treegen.bench.decoding.result import Settings
    from treegen.model.options import EngineOptions

    given = dict(options)
    model, ranks, quantization = given.pop("model"), given["ranks"], given["quantization"]
    if ranks > 1 and any(set(case.modes) & ALONE for case in cases):
        raise InputError("--tp goes with the modes all, one and off; leave the others out")
    known = shape_or_model(shape, model, default, images=bool(given.get("image_tokens")))
    in_4_bits = known is not None and quantization == "mxfp4"
    EngineOptions(
        model="",
        quantization=None if in_4_bits else quantization,
        tensor_parallel_size=ranks,
        kv_cache_dtype=given["kv_cache_dtype"],
        reproducible=given["reproducible"],
    )
    names = ("repeats", "time_limit", "memory", "eager", "reproducible")
    settings = Settings(**{name: given.pop(name) for name in names})
    from treegen.bench.suite import time_decoding
    from treegen.cli.terminal import render

    return time_decoding(render, cases, known, model, title, settings=settings, **given)
