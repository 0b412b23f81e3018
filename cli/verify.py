"""`treegen verify`: score the samples of a run with a reward model or a verifier."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import QUIET, RUN, add_option_groups, option


@click.command("verify")
@RUN
@option(
    "--verifier DIR|NAME",
    "A sequence classifier, a token classifier, or a language model that judges at marks.",
    required=True,
)
@option(
    "--mark TEXT",
    r"Put after each step, where the verifier is read. \n is a newline. "
    "A language model needs one.",
    default="",
)
@option("--separator TEXT", "Between the steps of a sample.", default=r"\n\n")
@option("--tokens RIGHT,WRONG", "What a language model says at a mark.", default="+,-")
@option("--label N", "The output of a classifier that means right. Default: the last.", type=int)
@option("--reduce HOW", "last, min, product or mean of the steps.", default="last")
@option(
    "--chat/--no-chat",
    "Put question and answer in the verifier's chat format. Default: if it has one.",
    default=None,
)
@option(
    "--turns",
    "Each step is a turn of the chat, and the mark is the verifier's answer, before which it is "
    "read.",
)
@option("--memory SIZE", "Cache for what samples share.", default="1GiB")
@option(
    "--batch-size",
    "Samples to compute at once, by models that share nothing.",
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
    """Score the samples of RUN by a reward model or a verifier, of outcomes or of each step.

    Scores are stored as they are made; to continue a stopped command, repeat it.
    `treegen score RUN --votes score,score:best` then reports weighted best-of-n and best-of-n
    next to maj@k.
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
