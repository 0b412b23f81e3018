"""`treegen judge`: models judge the samples of a run by a rubric."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.judge.options import JUDGE, show_judged
from treegen.cli.options.choices import collect_choices, drop_unset
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import CONTEXT, PATH, QUIET, RUN, add_option_groups, option
from treegen.cli.options.pairs import MODEL_ARGS

# Where the run is read from.
_READING = ("data", "task", "allow_task_code")


@click.command(
    "judge",
    cls=GroupedCommand,
    context_settings=CONTEXT,
    examples=(
        "treegen judge runs/x --judge Qwen/Qwen3-4B --rubric correctness --wordings 3",
        "treegen judge runs/x --judge A --judge B --verdicts samples --repeats 4",
        "treegen judge runs/x --pairs runs/y --judge Qwen/Qwen3-4B",
        "treegen judge runs/x",
    ),
)
@RUN
@JUDGE
@option("--repeats N", "Verdicts of each wording on each answer, by samples. Default: 1.", type=int)
@option(
    "--stop-when decided",
    "Draw no further repeats once the majority of all is settled.",
    type=click.Choice(("decided",)),
)
@option(
    "--pairs RUN2",
    "Compare the answers with those of this run, in both orders; may be repeated.",
    multiple=True,
    type=PATH,
)
@option("--temperature", "Of verdicts by samples; 0 is greedy. Default: 1.", type=float)
@option("--max-tokens", "Tokens of a sample at most. Default: 512.", type=int)
@option("--seed", "Seed of the samples. Default: 0.", type=int)
@option(
    "--apply-chat-template/--no-chat-template",
    "Put prompts in the judge's chat format. Default: if it has one.",
    "chat",
    default=None,
)
@option(
    "--labels FILE",
    "People's labels, as JSONL of problem_id, sample_index, label; they correct the mean.",
    type=PATH,
)
@option(
    "--weight W",
    "Weight of each judge of a jury, in their order. Default: 1 each.",
    "weights",
    multiple=True,
    type=float,
)
@option(
    "--combine",
    "How a jury's value is made of the judges'.",
    type=click.Choice(("mean", "majority")),
    default="mean",
)
@option(
    "--half-width W",
    "Print how many problems, answers, judges or wordings give the interval this half-width.",
    type=float,
)
@add_option_groups("judge model", "reading")
@QUIET
def command(
    run: Path,
    judge: tuple[str, ...],
    rubric: str | None,
    pairs: tuple[Path, ...],
    labels: Path | None,
    weights: tuple[float, ...],
    combine: str,
    half_width: float | None,
    **params: Any,
) -> None:
    """Let models grade the samples of RUN by a rubric, and report the mean.

    A judge reads the rubric once, each question once below it, and each answer once below that.
    Judgements are stored in RUN as they are made; to continue a stopped command, repeat it. Without
    --judge, the command reports the stored judgements and loads no model.
    """
    from treegen.api import judging
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, exit_with_complaints, json_line
    from treegen.errors import InputError, arg
    from treegen.evals.judging.components import check_half_width

    engine, reading, how = _sort_options(params)
    if half_width is not None:
        check_half_width(half_width)
    terminal = Terminal()
    about: dict[str, Any] = {"labels": labels, "weights": weights or None, "combine": combine}
    if judge:
        results = judging.judge(
            run,
            rubric,
            judge,
            pairs=pairs,
            listener=terminal,
            follow=terminal.count,
            options=engine,
            **about,
            **how,
            **reading,
        )
    else:
        unused = ["rubric"] * bool(rubric) + ["pairs"] * bool(pairs)
        if unused := [*unused, *engine, *how]:
            raise InputError(
                f"{arg(unused[0] + '=')} is of a new judging; give {arg('judge=')} too"
            )
        results = judging.judgings(run, **about, **reading)
    show_judged(results)
    document = results.to_json()
    if half_width is not None:
        document["needs"] = results.needs_json(half_width)
        for table in results.needs(half_width):
            echo(f"{table}\n")
    json_line({"run": str(run), **document})
    exit_with_complaints(results.complaints)


def _sort_options(params: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return how the judges are loaded, where the run is read, and how answers are judged."""
    # --judge names the judge.
    engine = collect_choices({name: params[name] for name in params if name in MODEL_ARGS})
    others = drop_unset({name: params[name] for name in params if name not in MODEL_ARGS})
    reading = {name: others[name] for name in _READING if name in others}
    return engine, reading, {name: others[name] for name in others if name not in _READING}
