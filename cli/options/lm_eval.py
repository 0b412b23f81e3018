"""Options of lm-eval's command that `treegen eval` takes too."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import click

from treegen.cli.options.options import option
from treegen.common.files import read_text
from treegen.errors import DataError, InputError

_NAMES: Final = ("samples", "check_integrity", "verbosity")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OPTIONS: Final = (
    option(
        "--samples JSON|FILE",
        """Run these documents of lm-eval's tasks: '{"TASK": [0, 5]}', counted from 0.""",
    ),
    option("--log-samples", "No effect: samples are stored.", expose_value=False),
    option("--check-integrity", "End before the model loads if a line of the data cannot be used."),
    option(
        "--verbosity",
        "Print log messages of libraries from this level on.",
        type=click.Choice(_LEVELS, case_sensitive=False),
    ),
)


def pop_lm_eval_options(params: dict[str, Any], tasks: Sequence[str]) -> bool:
    """Remove the options from a command's parameters, and apply them to the others.

    Args:
        params: The parameters; `samples` becomes `ids` or `limit`.
        tasks: The names of the tasks.

    Returns:
        Whether the data are checked first.
    """
    samples, check, verbosity = (params.pop(name) for name in _NAMES)
    if verbosity is not None:
        os.environ["LMEVAL_LOG_LEVEL"] = verbosity
        logging.basicConfig(level=verbosity, format="%(name)s: %(message)s")
    if samples is not None:
        if params["limit"] is not None or params["ids"]:
            raise InputError("--samples excludes --limit and --sample-id; give one of them")
        params.update(_choose_problems(_read_samples(samples), tasks))
    return bool(check)


def _read_samples(text_or_file: str) -> dict[str, list[int]]:
    """Return the documents of each task, counted from 0."""
    try:
        text = text_or_file if "{" in text_or_file else read_text(text_or_file)
        samples: dict[str, list[int]] = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"--samples is no JSON and no file with JSON: {error}") from None
    is_valid = isinstance(samples, dict) and all(
        isinstance(places, list) and places and all(type(at) is int and at >= 0 for at in places)
        for places in samples.values()
    )
    if not is_valid or not samples:
        raise InputError(
            f"""--samples must be such as '{{"TASK": [0, 5]}}', got {text_or_file!r:.80}"""
        )
    return samples


def _choose_problems(samples: dict[str, list[int]], tasks: Sequence[str]) -> dict[str, Any]:
    """Return the choice of the problems of one task, by id or as a range."""
    from treegen.evals.registry import is_lm_eval

    if len(tasks) != 1:
        raise InputError("--samples is for one TASK; give each task its own command")
    if is_lm_eval(tasks[0]):
        return {"ids": tuple(f"{name}/{at}" for name, places in samples.items() for at in places)}
    if list(samples) != [tasks[0]]:
        raise InputError(f"--samples names {', '.join(samples)}, and TASK is {tasks[0]}; name it")
    places = samples[tasks[0]]
    if places != list(range(places[0], places[0] + len(places))):
        raise InputError(
            f"--samples of {tasks[0]} must count up without gaps; name problems with --sample-id"
        )
    return {"limit": f"{places[0] + 1}-{places[-1] + 1}"}


def check_data(tasks: Sequence[str], choices: dict[str, Any]) -> None:
    """Load the data of tasks.

    Args:
        tasks: The names of the tasks.
        choices: The user's choices, by name.

    Raises:
        DataError: a line of the data cannot be used.
    """
    from treegen.evals.job import load_task_data
    from treegen.evals.registry import get_task
    from treegen.evals.task import TaskOptions

    named = {field.name for field in fields(TaskOptions)}
    options = TaskOptions(**{name: value for name, value in choices.items() if name in named})
    for name in tasks:
        task = get_task(name)
        task.configure(options.extra)
        skipped = load_task_data(task, options).skipped
        if skipped:
            raise DataError(
                f"{len(skipped):,} lines of the data of {name} cannot be used, such as "
                f"{skipped[0]}; mend them, or leave out --check-integrity"
            )
