"""`treegen score-texts`: log-probabilities of given texts, as columns."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import make_engine
from treegen.cli.options.options import PATH, QUIET, add_option_groups, option
from treegen.errors import InputError


@click.command("score-texts")
@click.argument("file", type=PATH)
@add_option_groups("model")
@option(
    "--top K",
    "Likeliest tokens to store in the place of each token.",
    type=click.IntRange(min=0),
    default=0,
)
@option(
    "--output -o DIR",
    "The file for the columns. To continue a stopped command, repeat it.",
    required=True,
    type=PATH,
)
@QUIET
def command(file: Path, top: int, output: Path, **params: Any) -> None:
    """Score the texts of FILE: the log-probability of each token, and the likeliest ones there.

    A line of FILE is a JSON object with "text", or with "prompt" and "completion", as text or as
    token ids; "id" names it. What texts share is computed once. Columns are Parquet files.
    """
    from dataclasses import asdict

    from treegen.cli.terminal.render import json_line, tell
    from treegen.common.cores import set_threads

    engine = make_engine(params)
    if not file.is_file():
        raise InputError(f"there is no file {file}; give one of JSON lines")

    from treegen.integrations.score_texts import Progress, score_texts
    from treegen.llm import LLM
    from treegen.model.config import resolve_device

    done = Progress(0, 0, 0)
    if resolve_device(engine.device).type == "cpu":
        set_threads()
    for done in score_texts(LLM(**asdict(engine)), file, output, top=top):
        tell(f"{done.texts:,} texts, {done.tokens:,} tokens in {output}")
    json_line({"output": str(output), "top": top, **asdict(done)})
