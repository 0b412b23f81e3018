"""`treegen search`: search for solutions step by step, and write run directories."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, Final

import click

from treegen.cli.options.choices import collect_choices, make_execution, make_placement
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import (
    OUTPUT,
    QUIET,
    add_option_groups,
    option,
    verifier_options,
)
from treegen.cli.options.pairs import read_pairs
from treegen.errors import InputError
from treegen.evals.search.methods import METHODS, methods_with_setting

_SHOWN_ERRORS: Final = 3
_FEW_RUNS: Final = 4
_BUDGET: Final = {"tokens": int, "calls": int, "seconds": float, "nodes": int, "actions": int}


def _join_names(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _setting_help(setting: str, what: str) -> str:
    """Return the help text of a setting that few methods read: the methods, and its meaning."""
    return f"{', '.join(methods_with_setting(setting))}: {what}"


def _describe_arguments() -> str:
    """Return the help of the methods' own arguments: their names."""
    return "; ".join(
        f"{name}: {', '.join(argument.name for argument in method.arguments)}"
        for name, method in METHODS.items()
        if method.arguments
    )


@click.command(
    "search",
    cls=GroupedCommand,
    file=True,
    examples=(
        "treegen search countdown --limit 4 --method beam --budget tokens=2000",
        "treegen search gsm8k --compare best-of-n,beam --limit 20 -o runs/both",
        "treegen search countdown --method path/to/file.py:function -a width=4",
        "treegen search text-world --limit 10 --method beam --budget actions=200",
        "treegen search harbor --data TASKS --model DIR --allow-code-execution",
    ),
)
@click.argument("task", required=False)
@option(
    "--method -m NAME", f"{_join_names(METHODS)}; or path/to/file.py:function, your own search."
)
@option(
    "--method-arg -a NAME=VALUE",
    f"Argument of the method: {_describe_arguments()}.",
    "arguments",
    multiple=True,
)
@option(
    "--compare NAME,NAME",
    "Run several methods, each with the whole budget, and compare solved problems and costs.",
)
@option(
    "--budget K=V,...",
    f"Limits of each problem's search: {', '.join(_BUDGET)}. tokens counts decoded tokens.",
    multiple=True,
)
@option(
    "--width",
    "States to keep per depth; dvts: subtrees; rebase: times --expand, steps per depth; sample, "
    "majority: samples at once. Default: the task's.",
    type=int,
)
@option("--depth", "Maximum steps of a solution. Default: the task's.", type=int)
@option("--expand", "Number of next steps per state. Default: the task's.", type=int)
@option(
    "--n-samples -n --num-samples",
    _setting_help("num_samples", "maximum number of solutions."),
    "num_samples",
    type=int,
)
@option(
    "--propose HOW",
    "Source of next steps: sample, or a name that the task knows (puzzles: list).",
)
@option(
    "--evaluate HOW",
    "Value of a state: logprob, min-logprob, reward:DIR for a reward model, or a name that the "
    "task knows (puzzles: judge, judge-sampled).",
)
@verifier_options("Reward model or verifier that scores states, instead of --evaluate.")
@option(
    "--prune-below",
    _setting_help("prune_below", "prune states with a lower value. Default: the task's."),
    type=float,
)
@option(
    "--exploration",
    _setting_help("exploration", "constant c of UCT. Default: 1.4."),
    type=float,
)
@option(
    "--iterations",
    _setting_help("iterations", "maximum number of visits. Default: 1000."),
    type=int,
)
@option(
    "--rollouts",
    _setting_help(
        "rollouts",
        "rollouts from a new state, which is judged by their ends; 0 judges the state itself. "
        "Default: 1.",
    ),
    type=int,
)
@option(
    "--choose HOW",
    "Answer to return: best (the solution with the highest value) or vote (solutions vote, "
    "weighted by value). Default: best.",
)
@option(
    "--environment NAME",
    "Where the tool calls of agents run: memory, local, inspect:PROVIDER or e2b:TEMPLATE. "
    "Default: the task's.",
)
@option("--force-calls", "Force each reply of an agent to be a tool call.", "forces_calls")
@option("--max-live", "Maximum live worlds of an agent. Default: 8.", type=int)
@option("--max-tokens", "Maximum tokens of a solution. Default: the task's.", type=int)
@option("--step-tokens", "Maximum tokens of a step. Default: the task's.", type=int)
@option("--seed", "Seed of the samples. Default: 0.", type=int)
@option("--repeats", "Searches per problem, for pass@k over searches. Default: 1.", type=int)
@option("--concurrency", "Maximum number of problems searched at once. Default: 64.", type=int)
@add_option_groups("drawing", "data", "arguments", "model", "cluster", "execution", "task code")
@OUTPUT
@QUIET
def command(
    method: str | None,
    compare: str | None,
    output: str | None,
    resume: str | None,
    **params: Any,
) -> None:
    """Search for solutions of each problem of TASK, and print the solved problems and the cost.

    Tasks with steps are countdown, game24 and gsm8k; in text-world, repair and harbor the steps
    are tool calls. Every finished search is stored with its whole tree; --resume continues a run
    that was stopped.

    \f
    Args:
        method: Name of the search method.
        compare: Names of methods to run, each with the whole budget, and to compare.
        output: Run directory.
        resume: Directory of the run to continue.
        **params: All other options, by parameter name.
    """
    choices = _collect_choices(params)
    placement = make_placement(params, choices.get("device", "auto"))
    from treegen.cli.terminal import render
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.execution import ModelLoader
    from treegen.evals.pipeline.search import describe_missing, search_all
    from treegen.report.text import cost_table

    terminal = Terminal(resume="search")
    results = search_all(
        _methods(method, compare),
        choices,
        ModelLoader(placement=placement),
        terminal,
        output=output,
        resume=resume,
        compare=compare is not None,
        execution=make_execution(params),
    )
    for result in results:
        errors = list(result.results["errors"].items())[:_SHOWN_ERRORS]
        for problem, error in errors:
            render.tell(f"{result.method}: the search of {problem!r} failed: {error}")
        if num := result.results.get("num_failed", 0) - len(errors):
            more = "1 more search" if num == 1 else f"{num:,} more searches"
            render.tell(f"{result.method}: {more} failed")
    render.echo("\n" + cost_table([result.results for result in results]))
    for result in results:
        render.echo(f"run: {result.path}")
    if len(results) > 1 and not any(result.missing for result in results):
        pairs = _pair_runs([shlex.quote(str(result.path)) for result in results])
        for first, second in pairs:
            render.echo(f"paired test: treegen compare {first} {second}")
        if len(pairs) > 1:
            render.echo(
                f"adjust the p-values of these {len(pairs)} tests with the function holm of "
                "treegen.evals.statistics.estimators"
            )
    runs = [{"run": str(r.path), **render.without_parts(r.results)} for r in results]
    render.json_line({"runs": runs})
    render.exit_with_complaints(describe_missing(results))


def _pair_runs(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of runs to test: all pairs of a few runs, otherwise each with the first."""
    if len(paths) <= _FEW_RUNS:
        return list(combinations(paths, 2))
    return [(paths[0], path) for path in paths[1:]]


def _collect_choices(params: dict[str, Any]) -> dict[str, Any]:
    from treegen.evals.arguments import read_arguments

    choices = collect_choices(params)
    if "arguments" in choices:
        choices["arguments"] = read_arguments(choices["arguments"], "method")
    if "budget" in choices:
        choices["budget"] = read_pairs(choices["budget"], "--budget", _BUDGET)
        if not choices["budget"]:
            raise InputError("--budget is empty; pass a limit, such as --budget tokens=2000")
    if "verifier_args" in choices:
        from treegen.evals.arguments import parse_verifier_settings

        texts = read_arguments(choices["verifier_args"], "verifier")
        choices["verifier_args"] = parse_verifier_settings(texts)
    return choices


def _methods(method: str | None, compare: str | None) -> list[str]:
    if compare is None:
        return [] if method is None else [method]
    if method is not None:
        raise InputError(
            "--method and --compare cannot be used together; remove one of the two options"
        )
    names = [name.strip() for name in compare.split(",") if name.strip()]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"--compare lists {name!r} twice; list each method only once")
    if not names:
        raise InputError(
            "--compare is empty; pass the names of methods, such as --compare sample,beam,tot-bfs"
        )
    return names
