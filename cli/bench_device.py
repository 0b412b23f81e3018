"""The parts of `treegen bench` that hold the engine against what the device can do."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.options import CONTEXT
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.bench.result import Result
    from treegen.bench.table import TextTable
    from treegen.bench.workloads import Case

_STOCK: Final = ("generate", "continuous")
_DEVICE: Final = (
    click.option("--dtype", default="auto", metavar="TYPE", help="auto, float32, bfloat16 or "
                 "float16; auto is bfloat16 on a GPU and float32 on a CPU."),
    click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N."),
    click.option("--ceiling-seconds", type=float, metavar="S", help="For each ceiling. Default: 2 "
                 "on a GPU, 0.1 on a CPU."),
)  # fmt: skip
_MODEL: Final = (
    click.option("--model", metavar="DIR|NAME", help="A checkpoint instead of a shape."),
    click.option("--repeats", default=3, show_default=True, help="Runs that are timed, after one "
                 "that is not."),
    click.option("--time-limit", default=120.0, show_default=True, metavar="S", help="Leave out "
                 "what takes at least so many seconds a run."),
    click.option("--memory", metavar="SIZE", help="For keys and values, such as 2GiB."),
    click.option("--compile", is_flag=True, help="Compile the decoder layers, on a GPU."),
    click.option("--against", default="", metavar="NAME,...", help=f"Engines of transformers to "
                 f"time as well: {', '.join(_STOCK)}."),
    *_DEVICE,
)  # fmt: skip
_PARTS: Final = (
    click.option("--shape", metavar="NAME", help="Random weights of this shape; default: by "
                 "experiment, see the output."),
    click.option("--scale", default=0.1, show_default=True, help="Share of the problems to run."),
    click.option("--length-scale", default=1.0, show_default=True, help="Multiply all lengths, to "
                 "try a command out."),
    *_MODEL,
)  # fmt: skip


def _with(options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.command(context_settings=CONTEXT)
@click.option("--rows", default="64,256,1024,4096", show_default=True, metavar="N,...")
@click.option("--prefix", default="1024,4096,16384", show_default=True, metavar="N,...",
              help="Keys that all rows share.")  # fmt: skip
@click.option("--suffix", default="0,128,1024", show_default=True, metavar="N,...",
              help="Keys of each row's own.")  # fmt: skip
@click.option("--heads", default="8,1,128", show_default=True, metavar="Q,KV,DIM",
              help="Query heads, KV heads and their width.")  # fmt: skip
@click.option("--repeats", default=20, show_default=True, help="Calls that are timed.")
@_with(_DEVICE)
def attention(
    rows: str, prefix: str, suffix: str, heads: str, repeats: int, dtype: str, device: str,
    ceiling_seconds: float | None,
) -> None:  # fmt: skip
    """The attention operator on the paper's grid, against attention without sharing."""
    grid = [
        (r, p, s)
        for s in _numbers(suffix, "suffix", least=0)
        for p in _numbers(prefix, "prefix")
        for r in _numbers(rows, "rows")
    ]
    width = _numbers(heads, "heads")
    if len(width) != 3 or width[0] % width[1]:
        raise InputError(f"--heads must be Q,KV,DIM with Q a multiple of KV, got {heads!r}")
    _at_least("repeats", repeats, 1)
    _check_device(dtype, ceiling_seconds)

    from treegen.bench import attention as bench
    from treegen.bench import ceilings as ceiling
    from treegen.bench.table import attention_line, attention_table
    from treegen.bench.timing import machine
    from treegen.cli.render import echo, json_line, notice
    from treegen.model_spec import DTYPES, resolve_device

    target = resolve_device(device)
    kind = DTYPES[dtype if dtype != "auto" else ("float32" if target.type == "cpu" else "bfloat16")]
    found = ceiling.measure(target, kind, ceiling_seconds)
    about = machine(target)
    echo(f"{_headline(about)}\n{found}\n")
    results = []
    options = bench.Heads(*width)
    for result in bench.measure(grid, options, found, device=target, dtype=kind, repeats=repeats):
        notice(attention_line(result))
        results.append(result)
    echo(f"{width[0]} query heads, {width[1]} KV heads, width {width[2]}; cold caches; medians of "
         f"{repeats}")  # fmt: skip
    _show(attention_table(results))
    json_line(
        {
            "bench": "attention", "machine": about, "ceilings": asdict(found),
            "heads": asdict(options), "results": [asdict(each) for each in results],
        }
    )  # fmt: skip


@click.command(context_settings=CONTEXT)
@click.option("--shape", metavar="NAME", help="Random weights of this shape: llama2-7b, llama3-8b, "
              "llama3.2-1b, qwen3-4b, codellama-7b, codellama-13b, yi-6b or tiny.")  # fmt: skip
@click.option("--rows", metavar="N,...", help="Samples decoded at once. Default: 1024.")
@click.option("--prefix", metavar="N,...", help="Prompt tokens that all share. Default: 2048.")
@click.option("--problems", default=1, show_default=True, help="Divide the rows among so many "
              "problems below the prefix.")  # fmt: skip
@click.option("--problem-tokens", default=0, show_default=True, help="Tokens of each problem.")
@click.option("--new-tokens", type=int, help="Tokens of each sample. Default: 64, with --grid 16.")
@click.option("--grid", is_flag=True, help="Sharing as the engine chooses it against none, for "
              "prefixes of 64 to 16,384 tokens and 1 to 4,096 rows.")  # fmt: skip
@_with(_MODEL)
def decode(
    shape: str | None, rows: str | None, prefix: str | None, problems: int, problem_tokens: int,
    new_tokens: int | None, grid: bool, against: str, **options: Any,
) -> None:  # fmt: skip
    """End to end: every level shared, one, none, and no attention at all, against the roofline."""
    from treegen.bench.decode import decode_cases, grid_cases, ratios

    if grid and (problem_tokens or against or problems != 1):
        raise InputError("--grid has no --problems and is not run --against other engines")
    new_tokens = (16 if grid else 64) if new_tokens is None else new_tokens
    _at_least("new-tokens", new_tokens, 2)
    _at_least("problems", problems, 1)
    counts = _numbers(rows or ("1,4,16,64,256,1024,4096" if grid else "1024"), "rows")
    prefixes = _numbers(prefix or ("64,256,1024,4096,16384" if grid else "2048"), "prefix")
    if grid:
        cases = grid_cases(counts, prefixes, new_tokens)
    else:
        cases = decode_cases(
            counts, prefixes, new_tokens, problems=problems, problem_tokens=problem_tokens,
            against=_engines(against),
        )  # fmt: skip
    results, document = _run(cases, shape or (None if options["model"] else "llama3-8b"), options)
    if grid:
        from treegen.bench.table import ratio_table

        found = ratios(results)
        document["never_slower"] = [asdict(each) for each in found]
        click.echo("\nDecode speed with sharing over speed without")
        _show(ratio_table(found))
    _print({"bench": "grid" if grid else "decode", **document})


@click.command(context_settings=CONTEXT)
@click.argument("names", nargs=-1, metavar="[EXPERIMENT]...")
@_with(_PARTS)
def paper(names: tuple[str, ...], **options: Any) -> None:
    """Jobs after the Hydragen paper's experiments: tables, needle, apps, gsm8k, mmlu, or all."""
    from treegen.bench.paper import PAPER

    _experiments(names or PAPER, options)


@click.command(context_settings=CONTEXT)
@_with(_PARTS)
def monkeys(**options: Any) -> None:
    """A job like GSM8K, 1,024 samples for each of 128 problems, on the shape of Llama-3.2-1B."""
    _experiments(("monkeys",), options)


def _experiments(names: tuple[str, ...], options: dict[str, Any]) -> None:
    from treegen.bench.paper import cases_of, experiment_of

    scale, lengths = options.pop("scale"), options.pop("length_scale")
    shape, against = options.pop("shape"), _engines(options.pop("against"))
    for name, value in (("scale", scale), ("length-scale", lengths)):
        if not 0 < value <= 1:
            raise InputError(f"--{name} must be above 0 and at most 1, got {value:g}")
    experiments = [experiment_of(name) for name in names]
    runs = [
        (each, cases_of(each, scale=scale, lengths=lengths, against=against))
        for each in experiments
    ]
    documents = []
    for each, cases in runs:
        wanted = shape or (None if options["model"] else each.shape)
        title = (
            f"{each.name}: {each.what}; {scale:g} of the problems, synthetic tokens\n"
            f"chosen here, not by the source: {each.chosen}\n"
        )
        _, document = _run(cases, wanted, options, title)
        documents.append(
            {
                "experiment": each.name, "scale": scale, "length_scale": lengths,
                "chosen_here": each.chosen, **document,
            }
        )  # fmt: skip
        click.echo("")
    _print({"bench": "paper", "experiments": documents})


def _run(
    cases: "list[Case]", shape: str | None, options: dict[str, Any], title: str = ""
) -> "tuple[list[Result], dict[str, Any]]":
    """Measure cases on a shape or a checkpoint and print the table; also as JSON holds it."""
    from treegen.bench.shapes import build, load, shape_of
    from treegen.units import parse_bytes

    if (shape is None) == (options["model"] is None):
        raise InputError("give --shape or --model, not both")
    known = shape_of(shape) if shape is not None else None
    _at_least("repeats", options["repeats"], 1)
    if not options["time_limit"] > 0:
        raise InputError(f"--time-limit must be above 0, got {options['time_limit']:g}")
    _check_device(options["dtype"], options["ceiling_seconds"])
    if options["memory"] is not None:
        parse_bytes(options["memory"])

    from treegen.bench import ceilings as ceiling
    from treegen.bench.result import Settings
    from treegen.bench.runs import Bench
    from treegen.bench.table import result_line, results_table
    from treegen.bench.timing import machine
    from treegen.cli.render import echo, notice

    kind = {"dtype": options["dtype"], "device": options["device"]}
    model, tokenizer = build(known, **kind) if known else load(options["model"], **kind)
    found = ceiling.measure(model.device, model.dtype, options["ceiling_seconds"])
    about = machine(model.device)
    echo(f"{title}{_headline(about)}, {model.spec.name}\n{found}\n")
    settings = Settings(
        options["repeats"], options["time_limit"], options["memory"], options["compile"]
    )
    bench = Bench(model, tokenizer, found, settings)
    results = []
    for result in bench.measure(cases):
        notice(result_line(result))
        results.append(result)
    bench.close()
    _show(results_table(results))
    return results, {
        "machine": about, "model": model.spec.name, "weights": "random" if known else "checkpoint",
        "ceilings": asdict(found), "settings": asdict(settings),
        "results": [asdict(each) for each in results],
    }  # fmt: skip


def _show(table: "TextTable") -> None:
    """Print a table: drawn on a terminal, to be pasted elsewhere."""
    from treegen.cli.render import echo, markdown
    from treegen.terminal import safe_text

    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table()
        for place, title in enumerate(table.head):
            drawn.add_column(Text(title), justify="right" if place in table.right else "left")
        for row in table.rows:
            drawn.add_row(*(Text(safe_text(cell)) for cell in row))
        Console(file=sys.stdout, highlight=False).print(drawn)
    else:
        echo(markdown(table.head, table.rows, table.right))
    for remark in table.remarks:
        echo(safe_text(remark).replace("\n", " "))


def _print(document: dict[str, Any]) -> None:
    from treegen.cli.render import json_line

    json_line(document)


def _headline(about: dict[str, Any]) -> str:
    return f"torch {about['torch']}, {about['threads']} threads, {about['device']}"


def _numbers(text: str, name: str, least: int = 1) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(w.isascii() and w.isdecimal() and len(w) < 8 and int(w) >= least for w in words):
        raise InputError(
            f"--{name} must be whole numbers of at least {least} with commas between, got {text!r}"
        )
    return list(dict.fromkeys(int(word) for word in words))


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in _STOCK:
            raise InputError(f"--against must be some of {', '.join(_STOCK)}, got {name!r}")
    return tuple(dict.fromkeys(names))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"--{name} must be at least {least}, got {value}")


def _check_device(dtype: str, ceiling_seconds: float | None) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if ceiling_seconds is not None and not 0 < ceiling_seconds < 60:
        raise InputError(f"--ceiling-seconds must be above 0 and below 60, got {ceiling_seconds:g}")
