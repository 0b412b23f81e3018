"""`treegen judge`: models judge the samples of a run by a rubric."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options.choices import collect_choices, drop_unset, pop_reading
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import (
    CONTEXT,
    PATH,
    QUIET,
    RUN,
    add_option_groups,
    add_options,
    option,
)
from treegen.cli.options.pairs import MODEL_ARGS

if TYPE_CHECKING:
    from treegen.api.judge_plan import JudgingPlan
    from treegen.api.judging import Judgings

# The settings of the run's model that apply to judges too.
_SHARED = ("device", "memory", "max_rows", "reproducible", "eager", "trust_remote_code")
JUDGE = add_options(
    option(
        "--judge DIR|NAME",
        "Model that judges the samples; may be repeated for a jury.",
        multiple=True,
    ),
    option(
        "--rubric NAME|FILE",
        "correctness, rating, pairwise, simpleqa, or a .yaml or .jinja file. Default: the task's "
        "rubric, or correctness.",
    ),
    option("--wordings N", "Use the first N wordings of the rubric. Default: all.", type=int),
    option(
        "--verdicts HOW",
        "likelihood: the probability of each choice. samples: generated texts that end with a "
        "verdict. Default: likelihood.",
        type=click.Choice(("likelihood", "samples")),
    ),
)


def plan_judging(
    judge: tuple[str, ...], judge_options: Mapping[str, Any], choices: Mapping[str, Any]
) -> "JudgingPlan | None":
    """Return how the samples of an evaluation will be judged, checked before any is drawn.

    Args:
        judge: The judges that the user names.
        judge_options: The rubric, the wordings and the kind of verdicts, by name; None if not set.
        choices: How the run's own model is loaded.

    Raises:
        TreegenError: the samples cannot be judged in this way.
    """
    from treegen.api.judge_plan import JudgingPlan
    from treegen.errors import InputError, arg

    unused = [name for name, value in judge_options.items() if value is not None]
    plan = JudgingPlan.make(judge, **judge_options, options=loading_of(choices)) if judge else None
    if plan is not None:
        plan.check()
    elif unused:
        raise InputError(
            f"{arg(unused[0] + '=')} has no effect without {arg('judge=')}; set {arg('judge=')} too"
        )
    return plan


def loading_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a judge is loaded, derived from how the run's own model is loaded."""
    # Others, such as the type of the weights, differ from model to model.
    return {name: choices[name] for name in _SHARED if name in choices}


def show_judged(judgings: "Judgings") -> None:
    """Print the judges' verdicts on a run."""
    from treegen.cli.terminal.render import echo
    from treegen.common.formatting import safe_text

    echo(safe_text(str(judgings)))


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
@option(
    "--repeats N",
    "Sampled verdicts per answer and wording; even 1 implies --verdicts samples. Default: 1.",
    type=int,
)
@option(
    "--stop-when decided",
    "Draw no more repeats once they cannot change the majority.",
    type=click.Choice(("decided",)),
)
@option(
    "--pairs RUN2",
    "Compare with the answers of RUN2, in both orders, by the rubric pairwise; may be repeated.",
    multiple=True,
    type=PATH,
)
@option("--temperature", "Temperature of sampled verdicts; 0 is greedy. Default: 1.", type=float)
@option("--max-tokens", "Maximum tokens of a sampled verdict. Default: 512.", type=int)
@option("--seed", "Seed of sampled verdicts. Default: 0.", type=int)
@option(
    "--apply-chat-template/--no-chat-template",
    "Render prompts with the judge's chat template. Default: if it has one.",
    "chat",
    default=None,
)
@option(
    "--labels FILE",
    "Labels by people, which treegen uses to correct the mean of the verdicts: JSONL with "
    "problem_id, sample_index and label.",
    type=PATH,
)
@option(
    "--weight W",
    "Weight of a judge; repeat it for each judge, in order. Default: 1.",
    "weights",
    multiple=True,
    type=float,
)
@option(
    "--combine",
    "How to combine the verdicts of several judges.",
    type=click.Choice(("mean", "majority")),
    default="mean",
)
@option(
    "--half-width W",
    "Print how many problems, answers, judges or wordings narrow the interval to +-W.",
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

    Each judgement is stored in RUN at once; to continue after an interruption, repeat the command.
    Without --judge, the command reports the stored judgements, or only those by --rubric, and loads
    no model.

    \f
    Args:
        run: The run directory.
        judge: Models that judge the samples.
        rubric: Name of a rubric, or a .yaml or .jinja file. Without judges, the rubric of the
            stored judgements to report.
        pairs: Runs whose answers are compared with those of `run`, in both orders, by the rubric
            pairwise.
        labels: JSONL file of labels by people, which correct the mean.
        weights: Weights of the judges, in their order.
        combine: How to combine the verdicts of several judges.
        half_width: Half width of the interval for which to print the necessary numbers of
            problems, answers, judges and wordings.
        **params: All other options, by parameter name.
    """
    from treegen.api import judging
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, exit_with_complaints, json_line
    from treegen.errors import InputError, arg
    from treegen.evals.judging.sample_size import check_half_width

    engine, reading, judge_options = _sort_options(params)
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
            **judge_options,
            **reading,
        )
    else:
        if unused := [*["pairs"] * bool(pairs), *engine, *judge_options]:
            raise InputError(
                f"{arg(unused[0] + '=')} has no effect on stored judgements; set "
                f"{arg('judge=')} too"
            )
        results = judging.judgings(run, rubric, **about, **reading)
    show_judged(results)
    document = results.to_json()
    if half_width is not None:
        document["needs"] = results.needs_json(half_width)
        for table in results.needs(half_width):
            echo(f"{table}\n")
    json_line({"run": str(run), **document})
    exit_with_complaints(results.describe_missing())


def _sort_options(params: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return how the judges are loaded, where the run is read, and how answers are judged."""
    # --judge names the judge.
    engine = collect_choices({name: params[name] for name in params if name in MODEL_ARGS})
    reading = pop_reading(params)
    judge_options = drop_unset({name: params[name] for name in params if name not in MODEL_ARGS})
    return engine, reading, judge_options
