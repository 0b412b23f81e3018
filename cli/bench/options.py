"""Options that the subcommands of `treegen bench` share, and their checks."""

from collections.abc import Callable
from typing import Any, Final

import click

from treegen.cli.options.choices import whole_numbers
from treegen.cli.options.options import JSON, Decorator
from treegen.errors import InputError

_TYPES: Final = ("auto", "float32", "bfloat16", "float16")


def bounded_option(
    flag: str, is_good: Callable[[Any], bool], must: str, *more: str, **how: Any
) -> Decorator:
    """Return an option that rejects values outside a bound.

    Args:
        flag: The name of the option.
        is_good: Whether a value is allowed.
        must: What the value must be, for the error message.
        more: Further names of the option.
        how: Further arguments of `click.option`.
    """

    def check(_: click.Context, __: click.Parameter, value: Any) -> Any:
        if value is not None and not is_good(value):
            raise InputError(f"{flag} must be {must}, got {value!r}")
        return value

    return click.option(flag, *more, callback=check, **how)


def count(
    flag: str, default: int | None, told: str, *more: str, least: int = 1, **how: Any
) -> Decorator:
    """Return the option of a whole number.

    Args:
        flag: The name of the option.
        default: Its default; None for none.
        told: Its help text.
        more: Further names of the option.
        least: The smallest allowed number. Default: 1.
        how: Further arguments of `click.option`.
    """
    how = {"type": int, "default": default, "show_default": default is not None, **how}
    return bounded_option(flag, least.__le__, f"at least {least}", *more, help=told, **how)


def counts(flag: str, told: str, *, least: int = 1, once: bool = True, **how: Any) -> Decorator:
    """Return the option of comma-separated whole numbers.

    Args:
        flag: The name of the option.
        told: Its help text.
        least: The smallest allowed number. Default: 1.
        once: Whether to drop repeated numbers. Default: True.
        how: Further arguments of `click.option`.
    """

    def check(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
        if text is None:
            return None
        found = whole_numbers(text, flag, least)
        return list(dict.fromkeys(found) if once else found)

    how = {"metavar": "N,...", "show_default": "default" in how, **how}
    return click.option(flag, help=told, callback=check, **how)


def _check_size(_: click.Context, __: click.Parameter, size: str | None) -> str | None:
    from treegen.common.formatting import parse_bytes

    if size is not None:
        parse_bytes(size)
    return size


def _check_model(_: click.Context, __: click.Parameter, model: str | None) -> str | None:
    """Reject a checkpoint that does not exist or has no weights."""
    from treegen.model.checkpoint.files import check_weights, locate

    if model is not None:
        check_weights(locate(model, None, weights=True))
    return model


DEVICE: Final = (
    bounded_option(
        "--dtype",
        _TYPES.__contains__,
        "auto, float32, bfloat16 or float16",
        default="auto",
        metavar="TYPE",
        help="auto, float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 on a CPU.",
    ),
    click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N."),
    bounded_option(
        "--ceiling-seconds",
        lambda seconds: 0 < seconds < 60,
        "above 0 and below 60",
        type=float,
        metavar="S",
        help="For each ceiling. Default: 2 on a GPU, 0.1 on a CPU.",
    ),
    JSON,
)
# Options that choose a shape or a checkpoint, and how its engine is made.
ENGINE: Final = (
    click.option("--model", metavar="DIR|NAME", help="A checkpoint instead of a shape."),
    count("--repeats", 3, "Runs that are timed, after one that is not."),
    click.option(
        "--memory", metavar="SIZE", callback=_check_size, help="For keys and values, such as 2GiB."
    ),
    click.option("--eager", is_flag=True, help="On a GPU: no compiling, no CUDA graphs."),
    click.option(
        "--reproducible", is_flag=True, help="On a GPU: each row as if it were alone, to the bit."
    ),
    *DEVICE,
)
CHECKPOINT: Final = click.option(
    "--model",
    metavar="DIR",
    callback=_check_model,
    help="Checkpoint; default: a small one with random weights, made on the spot.",
)


def shape_or_model(
    shape: str | None, model: str | None, default: str, *, images: bool = False
) -> str | None:
    """Return the name of a shape, or None for a checkpoint.

    Args:
        shape: The user's shape, if any.
        model: The user's checkpoint, if any.
        default: The shape if the user names neither.
        images: Whether prompts have images. Default: False.
    """
    from treegen.bench.vision import check_shape

    if shape and model:
        raise InputError("give --shape or --model, not both")
    return None if model else check_shape(shape or default, images=images)
