"""`treegen verify`: score the samples of a run with a reward model or a verifier."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import QUIET, RUN, add_option_groups, option


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
def command(
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
    from treegen.evals.config.verifier_settings import parse_verifier_settings
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
