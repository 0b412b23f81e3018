"""`treegen models`: which models run and how, and how one checkpoint would be run."""

from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options.options import QUIET, option
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.model.checkpoint_report import CheckpointReport


@click.command("models")
@click.argument("model", required=False, metavar="[DIR|FILE|NAME]")
@option("--dtype TYPE", "auto, float32, bfloat16 or float16.", default="auto")
@option("--quantization TYPE", "fp8, mxfp4, nvfp4, or none to expand what is stored so.")
@option("--kv-cache-dtype TYPE", "auto or fp8.", default="auto")
@option("--device NAME", "auto, cpu, cuda or cuda:N.", default="auto")
@option("--revision NAME", "Of a hub name.")
@option(
    "--image-size WxH,...",
    "Pixels of images whose tokens are counted. Default: 512x512,1024x768,2048x1536.",
    "sizes",
)
@option("--trust-remote-code", "Let code that comes with it run.")
@QUIET
def command(model: str | None, sizes: str | None, **options: Any) -> None:
    """Print which families of models run, how, and which are refused and why.

    With a checkpoint: print whether and how it runs, from its configuration alone.
    """
    from treegen.cli.terminal.render import echo, json_line
    from treegen.model.checkpoint_report import (
        IMAGE_SIZES,
        FamilyReport,
        inspect_checkpoint,
        parse_image_sizes,
    )
    from treegen.model.options import EngineOptions

    if model is not None:
        image_sizes = parse_image_sizes(sizes or IMAGE_SIZES)
        report: CheckpointReport | FamilyReport = inspect_checkpoint(
            EngineOptions(model=model, **options), image_sizes
        )
    elif sizes is None:
        report = FamilyReport.of_installed()
    else:
        raise InputError("--image-size is of one checkpoint; name it")
    echo(f"{report}\n")
    json_line(report.document)
