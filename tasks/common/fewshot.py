"""Choosing the solved examples that stand before every problem of a task."""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from treegen.errors import DataError, InputError
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.tasks.common.files import Rows
from treegen.tasks.common.sources import bundled_rows, file_rows

_Example = TypeVar("_Example")
Make = Callable[[dict[str, Any]], _Example]
"""Makes an example of a row; raises ValueError, with the reason, where there is none."""
Train = Callable[[str | None], tuple[Rows, str]]
"""Returns the rows of the train split that goes with some data, and what to call them."""


def normalize_text(text: str) -> str:
    """Return a text that is the same for texts that differ in spacing or case only."""
    return " ".join(text.split()).casefold()


def rank(seed: int, text: str) -> bytes:
    """Return where a text stands among those that are drawn by a seed.

    Ranking by a hash gives the same draw on every Python, which random.sample does not promise.
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
    """Return examples that are told from problems by their questions; see `pick_examples`."""
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
    taken: Mapping[Any, str],
    default: int | None,
    make: Make[_Example],
    train: Train | None = None,
    *,
    key: Callable[[_Example], Hashable],
    text: Callable[[_Example], str] = str,
    bundled: str = "",
    read: Callable[[Rows, str], Rows] = lambda rows, source: rows,
) -> list[_Example]:
    """Return the examples to show, none of which is a problem of the run.

    A few-shot file gives its first examples; one that is a problem is an error. A split gives
    examples drawn by seed. Otherwise the bundled ones are taken in order. Of the last two those
    that are problems are left out.

    Args:
        taken: The keys of the run's problems, with their ids.
        default: How many are shown if the user does not say; None if there is no default.
        key: By what examples are told from problems, and drawn.
        text: By what examples are told from problems, and drawn.
        bundled: The file of the task's own examples; without one they come from the train split.
        read: Changes the rows of a file or split, given what they are called.

    Raises:
        InputError: there are fewer examples than asked for.
        DataError: an example cannot be read, or is a problem of the run.
    """
    if options.num_fewshot == 0:
        return []
    wanted = options.num_fewshot or default
    found: list[_Example]
    if options.fewshot_file is not None:
        rows, source = file_rows(options.fewshot_file, None)
        found = _make_examples(read(rows, source), source, make)
        wanted = options.num_fewshot or len(found)
    elif options.fewshot_data is None and bundled:
        rows, source = bundled_rows(bundled), "the bundled few-shot file"
        found = [each for each in _make_examples(rows, bundled, make) if key(each) not in taken]
    else:
        if options.fewshot_data in (None, "train"):
            assert train is not None, "a task without a train split refuses to draw examples"
            rows, source = train(options.data)
        else:
            rows, source = file_rows(str(options.fewshot_data), None, "train")
        found = []
        for _, row in read(rows, source):  # bad rows are left out, since there are enough others
            with suppress(ValueError):
                found.append(make(row))
        found = [each for each in found if key(each) not in taken]
        found.sort(key=lambda example: rank(options.seed, text(example)))
    if wanted is None:
        raise InputError("fewshot_data needs num_fewshot: how many examples to draw")
    if wanted > len(found):
        others = "" if options.fewshot_file else " that are not themselves problems of this run"
        raise InputError(
            f"num_fewshot is {wanted} but {source} has {len(found)} examples{others}; "
            "lower it, give more, or run fewer problems"
        )
    for number, example in enumerate(found[:wanted], start=1):
        if key(example) in taken:
            raise DataError(
                f"example {number} of {source} is problem {taken[key(example)]!r} itself; "
                "remove it from one of the two files"
            )
    return found[:wanted]


def _make_examples(rows: Rows, source: str, make: Make[_Example]) -> list[_Example]:
    found = []
    for line, row in rows:
        try:
            found.append(make(row))
        except ValueError as error:
            raise DataError(f"{source}, line {line}: {error}; mend or remove the line") from None
    return found
