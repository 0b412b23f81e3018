"""Chooses the few-shot examples above every problem of a task."""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from treegen.errors import DataError, InputError, arg
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.tasks.common.files import Rows, find_place
from treegen.tasks.common.sources import bundled_rows, file_rows

_Example = TypeVar("_Example")
Make = Callable[[dict[str, Any]], _Example]
"""Makes an example from a row; raises ValueError with the reason if the row has none."""
Train = Callable[[str | None], tuple[Rows, str]]
"""Returns the rows of the train split that belongs to some data, and a name for messages."""


def normalize_text(text: str) -> str:
    """Return a text with single spaces and without case, for comparing."""
    return " ".join(text.split()).casefold()


def rank(seed: int, text: str) -> bytes:
    """Return a text's sort key in the random order of a seed.

    Ordering by a hash gives the same draw on every version of Python; random.sample does not
    promise it.
    """
    return hashlib.sha256(f"{seed}\n{text}".encode()).digest()


def pick_turns(
    options: TaskOptions,
    problems: Sequence[Problem],
    default: int | None,
    make: Make[Turn],
    train: Train,
    *,
    bundled: str = "",
) -> list[Turn]:
    """Return examples (question, answer), none of which asks the question of a problem of the run.

    Args:
        options: Few-shot options and seed of the run.
        problems: Problems of the run.
        default: Number of examples if the user gives none; None if there is no default.
        make: Makes an example from a row.
        train: Returns the rows of the train split for `options.data`.
        bundled: File of the task's own examples; if empty, they come from the train split.

    Raises:
        InputError: There are fewer examples than requested.
        DataError: An example cannot be read, or is a problem of the run.
    """
    return pick_examples(
        options,
        {normalize_text(problem.question): problem.id for problem in problems},
        default,
        make,
        train,
        key=lambda turn: normalize_text(turn[0]),
        text=lambda turn: turn[0],
        bundled=bundled,
    )


def pick_examples(
    options: TaskOptions,
    problem_ids: Mapping[Any, str],
    default: int | None,
    make: Make[_Example],
    train: Train | None = None,
    *,
    key: Callable[[_Example], Hashable],
    text: Callable[[_Example], str] = str,
    bundled: str = "",
    read: Callable[[Rows, str], Rows] = lambda rows, source: rows,
) -> list[_Example]:
    """Return the few-shot examples, none of which is a problem of the run.

    With a few-shot file, its first examples are used, and it is an error if one is a problem. With
    a split, examples are drawn by seed. Otherwise the bundled examples are used in order. Examples
    from a split or from the bundled file that are problems of the run are left out.

    Args:
        options: Few-shot options and seed of the run.
        problem_ids: The keys of the run's problems, with their ids.
        default: Number of examples if the user gives none; None if there is no default.
        make: Makes an example from a row.
        train: Returns the rows of the train split for `options.data`; None if the task has no train
            split.
        key: Returns the key of an example, which is compared with the keys in `problem_ids`.
        text: Returns the text of an example, whose hash decides the order of the draw.
        bundled: File of the task's own examples; if empty, they come from the train split.
        read: Changes the rows of a file or split. Its second argument is their name for messages.

    Raises:
        InputError: There are fewer examples than requested.
        DataError: An example cannot be read, or is a problem of the run.
    """
    if options.num_fewshot == 0:
        return []
    num_examples = options.num_fewshot or default
    examples: list[_Example]
    if options.fewshot_file is not None:
        rows, source = file_rows(options.fewshot_file, None)
        examples = make_examples(read(rows, source), source, make)
        num_examples = options.num_fewshot or len(examples)
    elif options.fewshot_data is None and bundled:
        rows, source = bundled_rows(bundled), "the bundled few-shot file"
        examples = [
            example
            for example in make_examples(rows, bundled, make)
            if key(example) not in problem_ids
        ]
    else:
        if options.fewshot_data in (None, "train"):
            assert train is not None, "a task without a train split refuses to draw examples"
            rows, source = train(options.data)
        else:
            rows, source = file_rows(str(options.fewshot_data), None, "train")
        examples = []
        for _, row in read(rows, source):  # skip bad rows, because the split has enough good ones
            with suppress(ValueError):
                examples.append(make(row))
        examples = [example for example in examples if key(example) not in problem_ids]
        examples.sort(key=lambda example: rank(options.seed, text(example)))
    if num_examples is None:
        raise InputError(
            f"{arg('fewshot_data')} needs {arg('num_fewshot')}, the number of examples to draw"
        )
    if num_examples > len(examples):
        restriction = "" if options.fewshot_file else " that are not in this run"
        raise InputError(
            f"{arg('num_fewshot')} is {num_examples}, but {source} has {len(examples)} "
            f"examples{restriction}; lower the number, pass more examples, or run fewer problems"
        )
    for number, example in enumerate(examples[:num_examples], start=1):
        if key(example) in problem_ids:
            raise DataError(
                f"few-shot example {number} in {source} is also problem "
                f"{problem_ids[key(example)]!r} of this run; remove the problem from one of the "
                "two files"
            )
    return examples[:num_examples]


def make_examples(rows: Rows, source: str, make: Make[_Example]) -> list[_Example]:
    """Return the examples of rows.

    Args:
        rows: The rows with their line numbers.
        source: Name of the rows, for messages.
        make: Makes an example from a row.

    Raises:
        DataError: A row has no example.
    """
    examples = []
    for number, row in rows:
        try:
            examples.append(make(row))
        except ValueError as error:
            file, line = find_place(number, source)
            raise DataError(f"{file}, line {line}: {error}; fix or remove the line") from None
    return examples
