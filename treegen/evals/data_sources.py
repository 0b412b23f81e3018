"""Describe where the problems and solved examples of a score come from."""

from importlib.resources import files
from pathlib import Path

from treegen.errors import Message, arg
from treegen.evals.task import TaskOptions

LABEL = "bundled problems"
EXAMPLES = "bundled examples"


def is_bundled(data: str | None) -> bool:
    """Return whether the problems come with treegen instead of being the published ones."""
    return data is None or Path(data).absolute().is_relative_to(_home())


def make_data_label(data: str | None, *, own_examples: bool = False) -> str:
    """Return the label that tables show after the task's name; "" for published or a user's data.

    Args:
        data: The data that the user chose, as in `TaskOptions`; None for the bundled problems.
        own_examples: Whether the prompts contain solved examples that come with treegen.
    """
    return LABEL if is_bundled(data) else EXAMPLES if own_examples else ""


def own_examples(options: TaskOptions, num: int) -> bool:
    """Return whether the examples are treegen's own, not from a split or a file of the user."""
    return num > 0 and options.fewshot_data is None and is_bundled(options.fewshot_file)


def describe_problems(data: str | None, source: str, num: int) -> str:
    """Return one line that describes where the problems come from.

    Args:
        data: The data that the user chose, as in `TaskOptions`.
        source: Where the task read the problems from.
        num: The number of problems.
    """
    if is_bundled(data):
        name = source.removeprefix("bundled ").rpartition("/")[2]
        origin = f"which comes with treegen; {arg('data=')} takes the published ones"
        return Message(f"problems: {num:,} of {name}, {origin}")
    return f"problems: {num:,} of {source}"


def describe_examples(options: TaskOptions, num: int) -> str:
    """Return one line that describes where the solved examples come from."""
    if not num:
        return "examples: none"
    if options.fewshot_data is not None:
        return f"examples: {num} drawn from {options.fewshot_data} with seed {options.seed}"
    if options.fewshot_file is not None:
        origin = ", which comes with treegen" if is_bundled(options.fewshot_file) else ""
        return f"examples: the first {num} of {options.fewshot_file}{origin}"
    return Message(
        f"examples: {num} that come with treegen; {arg('fewshot_file=')} takes the published ones, "
        f"{arg('fewshot_data=')} draws from a file"
    )


def _home() -> Path:
    return Path(str(files("treegen"))).absolute()
