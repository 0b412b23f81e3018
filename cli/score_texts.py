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
    "Number of likeliest tokens to store at each position.",
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
def command(file: Path, top: int, output: Path, **params: Any) -> None:
    """Compute the log-probability of each token in the texts of FILE, as Parquet files.

    Each line of FILE is a JSON object with "text", or with "prompt" and "completion", as text or
    token ids; "id" names the line. Shared beginnings of texts are computed once. To continue after
    an interruption, repeat the command.

    \f
    Args:
        file: JSONL file of the texts.
        top: Number of likeliest tokens to store at each position.
        output: Folder for the Parquet files.
        **params: Options of the model.
    """
    from dataclasses import asdict

    from treegen.cli.terminal.render import json_line, tell
    from treegen.common.cores import set_threads

    engine = make_engine(params)
    if not file.is_file():
        raise InputError(f"there is no file {file}; name a JSONL file")

    from treegen.integrations.score_texts import Progress, score_texts
    from treegen.llm import LLM
    from treegen.model.config import resolve_device

    done = Progress(0, 0, 0)
    if resolve_device(engine.device).type == "cpu":
        set_threads()
    for done in score_texts(LLM(**asdict(engine)), file, output, top=top):
        tell(f"{done.texts:,} texts, {done.tokens:,} tokens in {output}")
    json_line({"output": str(output), "top": top, **asdict(done)})
