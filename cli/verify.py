"""`treegen verify`: a reward model or a verifier scores the samples of a run."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.interrupts import Interrupted, received
from treegen.cli.options import CONTEXT, QUIET
from treegen.cli.usc import stored_job


@click.command("verify", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--verifier", required=True, metavar="DIR|NAME", help="A sequence classifier, a "
              "token classifier, or a language model that judges at marks.")  # fmt: skip
@click.option("--mark", default="", metavar="TEXT", help=r"Put after each step, where the verifier "
              r"is read. \n is a newline. A language model needs one.")  # fmt: skip
@click.option("--separator", default=r"\n\n", show_default=True, metavar="TEXT",
              help="Between the steps of a sample.")  # fmt: skip
@click.option("--tokens", default="+,-", show_default=True, metavar="RIGHT,WRONG",
              help="What a language model says at a mark.")  # fmt: skip
@click.option("--label", type=int, metavar="N", help="The output of a classifier that means right. "
              "Default: the last.")  # fmt: skip
@click.option("--reduce", default="last", show_default=True, metavar="HOW",
              help="last, min, product or mean of the steps.")  # fmt: skip
@click.option("--chat/--no-chat", default=None, help="Put question and answer in the verifier's "
              "chat format. Default: if it has one.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True,
              help="Samples to compute at once.")  # fmt: skip
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N. Default: a GPU if there is "
              "one.")  # fmt: skip
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@QUIET
def command(
    run: Path, verifier: str, mark: str, separator: str, tokens: str, label: int | None,
    reduce: str, chat: bool | None, batch_size: int, device: str | None, data: str | None,
    quiet: bool,
) -> None:  # fmt: skip
    """Score the samples of RUN by a reward model or a verifier, of outcomes or of each step.

    Scores are stored as they come, and a command that was stopped goes on when it is given again.
    `treegen score RUN --votes score,score:best` then reports weighted best-of-n and best-of-n
    beside maj@k.
    """
    from treegen.cli.render import echo, json_line, notice
    from treegen.cli.work import either
    from treegen.errors import InputError
    from treegen.evals.verify import verify
    from treegen.runs import RunDir, graceful_signals

    pair = tokens.split(",")
    if len(pair) != 2 or not all(pair):
        raise InputError(f"--tokens must be two tokens with a comma between them, got {tokens!r}")
    settings: dict[str, Any] = {
        "mark": mark.replace(r"\n", "\n"),
        "separator": separator.replace(r"\n", "\n"),
        "tokens": (pair[0], pair[1]),
        "label": label,
        "reduce": reduce,
        "chat": chat,
    }
    if not settings["separator"]:
        raise InputError("--separator must not be empty")
    with RunDir.open(run) as opened:
        for line in opened.notices:
            notice(line)
        job = stored_job(run, opened.info, data)

        from treegen.model.verifier import Verifier, load_scorer

        if not quiet:
            notice(f"loading {verifier}")
        judge = Verifier(
            scorer=load_scorer(verifier, device=device), batch_size=batch_size, **settings
        )
        by = {"verifier": verifier, **settings, "tokens": pair}
        done = planned = 0
        with graceful_signals() as graceful:
            stop = either(received, graceful)
            for so_far in verify(job, opened, judge, by, stop=stop):
                done, planned = so_far
            if signum := stop():
                raise Interrupted(
                    signum, f"{done:,} of {planned:,} scores are kept; give the command again"
                )
    if not quiet:
        echo(f"{done:,} samples have a score; report votes by it with: "
             f"treegen score {run} --votes score,score:best")  # fmt: skip
    json_line({"run": str(run), "scores": done})
