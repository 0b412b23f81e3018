"""Chooses the solved examples above every APPS problem."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from treegen.errors import DataError, InputError, arg
from treegen.evals.task import TaskOptions
from treegen.tasks.apps.data import (
    HUB_NAMES,
    LoadedRows,
    Row,
    load_bundled_shots,
    load_rows,
    load_split,
)
from treegen.tasks.apps.prompts import ask, with_tabs
from treegen.tasks.common.fewshot import normalize_text, rank

# Longer examples would fill the context.
_MAX_CHARS: Final = 12_000


def load_shots(
    options: TaskOptions, problems: Sequence[Row], default: int, *, calls: bool, form: str
) -> tuple[tuple[str, ...], bool]:
    """Return the examples, none of which is a problem, and whether they are treegen's own.

    With a few-shot file, its first examples are used. Otherwise examples are drawn by seed: from
    fewshot_data; or from the train split next to the problems, if it has enough; or from the
    bundled examples.

    Args:
        options: Few-shot options and seed of the run.
        problems: Problems of the run.
        default: Number of examples if the user gives none.
        calls: Whether to use examples with starter code, otherwise examples without it.
        form: The form of the prompt, one of PROMPTS.

    Raises:
        InputError: There are fewer examples than requested.
        DataError: An example cannot be read, or is a problem of the run.
    """
    wanted = default if options.num_fewshot is None else options.num_fewshot
    if wanted == 0:
        return (), False
    bundled = load_bundled_shots()
    taken = {normalize_text(row.question) for row in problems}
    if options.fewshot_file is not None:
        source = load_rows(options.fewshot_file, None)
        for number, row in enumerate(source.rows[:wanted], start=1):
            if normalize_text(row.question) in taken:
                raise DataError(
                    f"example {number} of {source.source} is a problem of this run; remove it"
                )
        shots = _first(_shots(source.rows, form), wanted)
    else:
        source = _source(options)
        shots = _first(
            _shots(_draw_examples(source, taken, options.seed, calls=calls), form), wanted
        )
        if len(shots) < wanted and options.fewshot_data is None:
            source = bundled
            shots = _first(
                _shots(_draw_examples(source, taken, options.seed, calls=calls), form), wanted
            )
    if len(shots) < wanted:
        raise InputError(
            f"{arg('num_fewshot')} is {wanted} but {source.source} has {len(shots)} solved "
            f"examples {'with' if calls else 'without'} starter code that are no problems of this "
            f"run; lower it, or name others with {arg('fewshot_data')}"
        )
    return tuple(shots), source.source == bundled.source


def _first(shots: Iterable[str], wanted: int) -> list[str]:
    return list(islice(shots, wanted))


def _draw_examples(
    source: LoadedRows, taken: Collection[str], seed: int, *, calls: bool
) -> list[Row]:
    fit = [
        row
        for row in source.rows
        if bool(row.starter) == calls and normalize_text(row.question) not in taken
    ]
    return sorted(fit, key=lambda row: rank(seed, row.question))


def _source(options: TaskOptions) -> LoadedRows:
    if options.fewshot_file is not None:
        return load_rows(options.fewshot_file, None)
    if options.fewshot_data not in (None, "train"):
        return load_rows(options.fewshot_data, None)
    if options.data in HUB_NAMES:
        return load_rows(options.data, "train")
    if options.data is not None:
        data = Path(options.data)
        folder = data if data.is_dir() else data.parent
        if (folder / "train").is_dir() or (folder / "train.jsonl").is_file():
            return load_split(folder, "train")
        if (folder.parent / "train").is_dir():
            return load_split(folder.parent, "train")
        if options.fewshot_data == "train":
            raise DataError(
                f"there is no train split beside {data}; give {arg('fewshot_data')} a path"
            )
    elif options.fewshot_data == "train":
        raise DataError(
            f"the bundled problems have no train split; give {arg('fewshot_data')} a path"
        )
    return load_bundled_shots()


def _shots(rows: Sequence[Row], form: str) -> Iterator[str]:
    for row in rows:
        with suppress(ValueError):
            if solutions := row.solutions:
                prompt = ask(row.question, row.starter, calls=row.fn_name is not None, form=form)
                shot = prompt + with_tabs(solutions[0])
                if len(shot) <= _MAX_CHARS:
                    yield shot
