"""Commands that score again: `treegen score`, `verify`, `usc`, `replay` and `score-texts`."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import collect_choices, make_engine, make_execution, pop_reading
from treegen.cli.options.options import (
    ALL_FILTERS,
    PATH,
    QUIET,
    RUN,
    add_option_groups,
    is_quiet,
    option,
)
from treegen.errors import InputError


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

    execution = make_execution(params, rescore=rejudge)
    result = rescore_run(run, collect_choices(params), Terminal(), execution)
    if not is_quiet():
        render.show_report(result.results, result.report, all_filters=all_filters)
        render.save_heat_maps(result.report, run)
    if result.missing:
        planned = result.results["planned"]
        render.notice(f"{result.missing:,} of {planned:,} samples are not drawn yet")
    render.echo("")
    render.show_headline(describe_results(result.results, short=True), result.report, run)
    # The form of `treegen eval`, which may have several runs.
    render.json_line({"runs": [{"run": str(run), **render.without_parts(result.results)}]})
    render.exit_with_complaints([result.unscored] if result.unscored else [])


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
    "--tokens RIGHT,WRONG",
    "Tokens that a language model uses for right and wrong steps.",
    default="+,-",
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
        **settings: Options of the verifier and of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import parse_bytes
    from treegen.evals.arguments import parse_verifier_settings
    from treegen.evals.pipeline.rescoring import score_run_with_verifier

    reading = pop_reading(settings)
    texts = {name: settings[name] for name in ("mark", "separator", "tokens", "reduce")}
    verifier_settings = {n: v for n, v in settings.items() if n not in texts and v is not None}
    parse_bytes(memory)
    terminal = Terminal()
    done = score_run_with_verifier(
        run,
        reading,
        terminal,
        terminal.count,
        verifier,
        {**verifier_settings, **parse_verifier_settings(texts)},
        device=device,
        memory=memory,
        batch_size=batch_size,
    )
    echo(
        f"{done:,} samples have a score; report votes by it with: "
        f"treegen score {shlex.quote(str(run))} --votes score,score:best"
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
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.pipeline.rescoring import pick_run_samples

    terminal = Terminal()
    done = pick_run_samples(
        run, reading, terminal, terminal.count, most=most, trust_remote_code=trust_remote_code
    )
    echo(
        f"{done:,} problems have a pick; report them with: treegen score "
        f"{shlex.quote(str(run))} --votes usc"
    )
    json_line({"run": str(run), "picks": done})


@click.command("replay")
@RUN
@option(
    "--stop-batch",
    "Samples per problem between two checks of the rule.",
    type=click.IntRange(min=1),
    default=8,
)
@option(
    "--chance",
    "Probability P of decided:P; may be repeated. Default: 0.7, 0.8, 0.9, 0.95 and 0.99.",
    "chances",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    multiple=True,
)
@option("--filter NAME", "Extract answers with this filter.", "filter_name")
@add_option_groups("reading")
@QUIET
def replay(
    run: Path,
    stop_batch: int,
    chances: tuple[float, ...],
    filter_name: str | None,
    **reading: Any,
) -> None:
    """Estimate what `--stop-when decided` would have saved in RUN, and how the vote would change.

    The command applies the rule to 32 random orders of each problem's samples. Intervals are over
    problems. Each difference compares a vote with the vote of all samples of the same problems.

    \f
    Args:
        run: The run directory.
        stop_batch: Samples per problem between two checks of the rule.
        chances: Probabilities P of the rule decided:P.
        filter_name: Name of the filter that extracts answers.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.render import echo, json_line, read_run
    from treegen.report.run_document import filter_of
    from treegen.report.run_settings import describe_view
    from treegen.report.stopping_savings import CHANCES, get_replay_problems, savings

    view = read_run(run, reading)
    replay_problems = get_replay_problems(view, filter_of(view, filter_name))
    groups = savings(
        replay_problems, batch=stop_batch, chances=chances or CHANCES, problems=view.problems
    )
    for text in (describe_view(view), *groups):
        echo(f"{text}\n")
    json_line({"run": str(run), "stop_batch": stop_batch, "groups": groups})


@click.command("score-texts")
@click.argument("file", type=PATH)
@add_option_groups("model")
@option(
    "--top K",
    "Number of most likely tokens to store at each position.",
    type=click.IntRange(min=0),
    default=0,
)
@option(
    "--output -o DIR",
    "Folder for the Parquet files.",
    required=True,
    type=PATH,
)
@QUIET
def score_texts(file: Path, top: int, output: Path, **params: Any) -> None:
    """Compute the log-probability of each token in the texts of FILE, as Parquet files.

    Each line of FILE is a JSON object with "text", or with "prompt" and "completion", as text or
    token ids; "id" names the line. Shared beginnings of texts are computed once. To continue after
    an interruption, repeat the command.

    \f
    Args:
        file: JSONL file of the texts.
        top: Number of most likely tokens to store at each position.
        output: Folder for the Parquet files.
        **params: Options of the model.
    """
    from treegen.cli.terminal.render import json_line, tell
    from treegen.common.cores import set_threads
    from treegen.common.files import check_regular, describe_read_error

    engine = make_engine(params)
    try:
        check_regular(file)
    except OSError as error:
        raise InputError(describe_read_error(file, error)) from None

    from treegen.integrations import score_texts as texts
    from treegen.llm import LLM
    from treegen.model.config import resolve_device

    done = texts.Progress(0, 0, 0)
    if resolve_device(engine.device).type == "cpu":
        set_threads()
    for done in texts.score_texts(LLM(**asdict(engine)), file, output, top=top):
        tell(f"{done.texts:,} texts, {done.tokens:,} tokens in {output}")
    json_line({"output": str(output), "top": top, **asdict(done)})
