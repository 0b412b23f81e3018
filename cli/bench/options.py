"""Options that the subcommands of `treegen bench` and the scripts of examples/benchmarks share."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from treegen.bench.shapes import shape_of
from treegen.bench.workloads import TIME_LIMIT
from treegen.cli.options.choices import whole_numbers
from treegen.cli.options.options import JSON, Decorator, option
from treegen.errors import InputError

_TYPES: Final = ("auto", "float32", "bfloat16", "float16")


def bounded_option(
    flag: str, is_valid: Callable[[Any], bool], expected: str, *more: str, **kwargs: Any
) -> Decorator:
    """Return an option that rejects values outside a bound.

    Args:
        flag: The name of the option.
        is_valid: Returns whether a value is allowed.
        expected: Description of the allowed values, which follows "must be" in the error message.
        more: Further names of the option.
        kwargs: Further arguments of `click.option`.
    """

    def _check(_: click.Context, __: click.Parameter, value: Any) -> Any:
        if value is not None and not is_valid(value):
            raise InputError(f"{flag} must be {expected}, got {value!r}")
        return value

    return click.option(flag, *more, callback=_check, **kwargs)


def int_option(
    flag: str, default: int | None, text: str, *more: str, minimum: int = 1, **kwargs: Any
) -> Decorator:
    """Return the option of an integer.

    Args:
        flag: The name of the option.
        default: Its default; None for none.
        text: Its help text.
        more: Further names of the option.
        minimum: The smallest allowed number. Default: 1.
        kwargs: Further arguments of `click.option`.
    """
    kwargs = {"type": int, "default": default, "show_default": default is not None, **kwargs}
    return bounded_option(flag, minimum.__le__, f"at least {minimum}", *more, help=text, **kwargs)


def int_list_option(
    flag: str, text: str, *, minimum: int = 1, once: bool = True, **kwargs: Any
) -> Decorator:
    """Return the option of comma-separated integers.

    Args:
        flag: The name of the option.
        text: Its help text.
        minimum: The smallest allowed number. Default: 1.
        once: Whether to drop repeated numbers. Default: True.
        kwargs: Further arguments of `click.option`.
    """

    def _check(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
        if value is None:
            return None
        numbers = whole_numbers(value, flag, minimum)
        return list(dict.fromkeys(numbers) if once else numbers)

    kwargs = {"metavar": "N,...", "show_default": "default" in kwargs, **kwargs}
    return click.option(flag, help=text, callback=_check, **kwargs)


def name_list_option(flag: str, names: Sequence[str], text: str, **kwargs: Any) -> Decorator:
    """Return the option of a comma-separated list of names.

    Args:
        flag: The name of the option.
        names: The allowed names.
        text: Its help text.
        kwargs: Further arguments of `click.option`.
    """

    def _check(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        chosen = tuple(name.strip() for name in value.split(",") if name.strip())
        for name in chosen:
            if name not in names:
                raise InputError(f"{flag} must be chosen from {', '.join(names)}, got {name!r}")
        return tuple(dict.fromkeys(chosen))

    return click.option(flag, metavar="NAME,...", help=text, callback=_check, **kwargs)


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
    option("--device NAME", "auto, cpu, cuda or cuda:N.", default="auto"),
    bounded_option(
        "--ceiling-seconds",
        lambda seconds: 0 < seconds < 60,
        "above 0 and below 60",
        type=float,
        metavar="S",
        help="Seconds to measure each roofline rate. Default: 2 on a GPU, 0.1 on a CPU.",
    ),
    JSON,
)
# Options that choose a shape or a checkpoint, and how its engine is made.
ENGINE: Final = (
    option("--model DIR|NAME", "Checkpoint to use instead of --shape."),
    int_option("--repeats", 3, "Number of timed runs, after one untimed run."),
    option("--memory SIZE", "Size of the KV cache, such as 2GiB.", callback=_check_size),
    option("--eager", "On a GPU, skip compiling and CUDA graphs."),
    option("--reproducible", "On a GPU, compute bit-identical rows in any batch."),
    *DEVICE,
)
# Options of whole decode runs.
RUNS: Final = (
    bounded_option(
        "--time-limit",
        lambda seconds: seconds > 0,
        "above 0",
        type=float,
        metavar="S",
        help=f"Skip cases whose run takes at least this many seconds. Default: {TIME_LIMIT:g}.",
    ),
    int_option(
        "--tensor-parallel-size",
        1,
        "Split the model across N GPUs of one machine. The roofline is that of all N.",
        "--tp",
        "ranks",
        metavar="N",
    ),
    option(
        "--quantization TYPE",
        "fp8: 8-bit weight matrices. With --shape, two more types: nvfp4 (4-bit matrices) and "
        "mxfp4 (4-bit experts of gpt-oss).",
    ),
    option("--kv-cache-dtype TYPE", "fp8: store keys and values in 8 bits.", default="auto"),
    *ENGINE,
)
CHECKPOINT: Final = option(
    "--model DIR",
    "Checkpoint directory. Default: a small model with random weights.",
    callback=_check_model,
)


def shape_or_model(shape: str | None, model: str | None, default: str) -> str | None:
    """Return the name of a shape, or None for a checkpoint.

    Args:
        shape: The user's shape, if any.
        model: The user's checkpoint, if any.
        default: The shape if the user names neither.
    """
    if shape and model:
        raise InputError(
            "--shape and --model cannot be used together; remove one of the two options"
        )
    return None if model else shape_of(shape or default).name
