"""`treegen models`: which models run and how, and how one checkpoint would be run."""

from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options.options import QUIET, option
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.model.checkpoint_report import CheckpointReport


@click.command("models")
@click.argument("model", required=False, metavar="[DIR|FILE|NAME]")
@option("--dtype TYPE", "auto, float32, bfloat16 or float16. Default: auto.", default="auto")
@option(
    "--quantization TYPE", "fp8, mxfp4, nvfp4, or none to dequantize stored 8-bit or 4-bit weights."
)
@option("--kv-cache-dtype TYPE", "auto or fp8. Default: auto.", default="auto")
@option("--device NAME", "auto, cpu, cuda or cuda:N. Default: auto.", default="auto")
@option("--revision NAME", "Branch, tag or commit of a hub name. Default: the newest one.")
@option(
    "--image-size WxH,...",
    "Image sizes in pixels to count tokens for. Default: 512x512,1024x768,2048x1536.",
    "sizes",
)
@option("--trust-remote-code", "Run the code of the model's repository.")
@QUIET
def command(model: str | None, sizes: str | None, **options: Any) -> None:
    """Print which model families run and how, and which do not run and why.

    With a checkpoint, print whether and how it runs. The command reads no weights.
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
        raise InputError(
            "--image-size needs a checkpoint; pass the directory or the name of the checkpoint"
        )
    echo(f"{report}\n")
    json_line(report.document)
