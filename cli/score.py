"""`treegen score`, `treegen verify` and `treegen usc`: score the samples of a run again."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import collect_choices, make_execution
from treegen.cli.options.options import ALL_FILTERS, QUIET, RUN, add_option_groups, is_quiet, option


@click.command("score")
@RUN
@add_option_groups("reading")
@option("--rejudge", "Run programs again, even if they have a stored verdict.")
@add_option_groups("arguments", "report", "execution")
@ALL_FILTERS
@QUIET
def score(run: Path, rejudge: bool, all_filters: bool, **params: Any) -> None:
    """Score the samples in the directory RUN again and rewrite its results.json.

    \f
    Args:
        run: The run directory.
        rejudge: Whether to run programs again that have a stored verdict.
        all_filters: Whether to show the results of every filter, not only of the first.
        **params: Options of votes, metrics and execution.
    """
    from treegen.cli.terminal import render
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.rescoring import rescore_run
    from treegen.report.run_settings import describe_results

    execution = make_execution(params, anew=rejudge)
    result = rescore_run(run, collect_choices(params), Terminal(), execution)
    if not is_quiet():
        render.show_report(result.results, result.report, all_filters=all_filters)
        render.pictures(result.report, run)
    if result.missing:
        planned = result.results["planned"]
        render.notice(f"{result.missing:,} of {planned:,} samples are not drawn yet")
    render.echo("")
    render.show_headline(describe_results(result.results, short=True), result.report, run)
    # The form of `treegen eval`, which may have several runs.
    render.json_line({"runs": [{"run": str(run), **render.without_parts(result.results)}]})
    render.exit_with_complaints([result.complaint] if result.complaint else [])


@click.command("verify")
@RUN
@option(
    "--verifier DIR|NAME",
    "Sequence classifier, token classifier, or language model that judges at --mark.",
    required=True,
)
@option(
    "--mark TEXT",
    r"Text to insert after each step, where treegen reads the score; required for a language "
    r"model. \n is a newline.",
    default="",
)
@option("--separator TEXT", "Text between the steps of a sample.", default=r"\n\n")
@option(
    "--tokens RIGHT,WRONG", "A language model's tokens for right and wrong steps.", default="+,-"
)
@option("--label N", "Index of the classifier output for correct. Default: the last.", type=int)
@option("--reduce HOW", "How to combine the steps: last, min, product or mean.", default="last")
@option(
    "--chat/--no-chat",
    "Render question and answer with the verifier's chat template. Default: if it has one.",
    default=None,
)
@option(
    "--turns",
    "Render each step as a user turn; treegen reads the score before the answer --mark.",
)
@option("--memory SIZE", "Cache for shared parts of the samples.", default="1GiB")
@option(
    "--batch-size",
    "Samples to compute at once, for models without a shared cache.",
    type=click.IntRange(min=1),
    default=16,
)
@option("--device NAME", "cpu, cuda or cuda:N. Default: a GPU if there is one.")
@add_option_groups("reading")
@QUIET
def verify(
    run: Path,
    verifier: str,
    memory: str,
    batch_size: int,
    device: str | None,
    data: str | None,
    task: str | None,
    allow_task_code: bool,
    **settings: Any,
) -> None:
    """Score the samples of RUN with an outcome or process reward model.

    Each score is stored at once; to continue after an interruption, repeat the command. `treegen
    score RUN --votes score,score:best` then reports weighted best-of-n and best-of-n next to maj@k.

    \f
    Args:
        run: The run directory.
        verifier: Sequence classifier, token classifier, or language model that judges at --mark.
        memory: Cache for shared parts of the samples.
        batch_size: Samples to compute at once, for models without a shared cache.
        device: Where the verifier computes: cpu, cuda or cuda:N.
        data: Current path of the run's problems, if they have moved.
        task: File and class of the run's task, if the task is in a file.
        allow_task_code: Whether to run task and method code that the run names.
        **settings: Options of the verifier.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import parse_bytes
    from treegen.evals.arguments import parse_verifier_settings
    from treegen.evals.pipeline.rescoring import score_run_with_verifier

    texts = {name: settings[name] for name in ("mark", "separator", "tokens", "reduce")}
    others = {n: v for n, v in settings.items() if n not in texts and v is not None}
    parse_bytes(memory)
    reading = {"data": data, "task": task, "allow_task_code": allow_task_code}
    terminal = Terminal()
    done = score_run_with_verifier(
        run,
        reading,
        terminal,
        terminal.count,
        verifier,
        {**others, **parse_verifier_settings(texts)},
        device=device,
        memory=memory,
        batch_size=batch_size,
    )
    echo(
        f"{done:,} samples have a score; report votes by it with: "
        f"treegen score {run} --votes score,score:best"
    )
    json_line({"run": str(run), "scores": done})


@click.command("usc")
@RUN
@option(
    "--most N",
    "Show the model only the first N samples of a problem. Default: all.",
    type=click.IntRange(min=1),
)
@add_option_groups("reading", "trust")
@QUIET
def usc(run: Path, most: int | None, trust_remote_code: bool, **reading: Any) -> None:
    """Let the model of RUN pick the most consistent sample of each problem.

    This is universal self-consistency: treegen shows the samples to the model that drew them. Each
    pick is stored at once; to continue after an interruption, repeat the command. `treegen score
    RUN --votes usc` then reports the picks next to maj@k.

    \f
    Args:
        run: The run directory.
        most: Number of samples of a problem to show to the model.
        trust_remote_code: Whether to run the code of the model's repository.
        **reading: Options of the group "reading", as for `load_run`.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.pipeline.rescoring import pick_run_samples

    terminal = Terminal()
    done = pick_run_samples(
        run, reading, terminal, terminal.count, most=most, trust_remote_code=trust_remote_code
    )
    echo(f"{done:,} problems have a pick; report them with: treegen score {run} --votes usc")
    json_line({"run": str(run), "picks": done})
