"""A run as pandas frames, for a notebook."""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from treegen.errors import InputError

if TYPE_CHECKING:
    import pandas


class RunFrames(Protocol):
    """A run that was read, as frames. They are of what was there when it was opened."""

    @property
    def view(self) -> Any:
        """The `treegen.report.view.RunView` that the frames are made of."""
        ...

    def samples(self) -> "pandas.DataFrame":
        """Return a frame with a row for each finished sample, or each search of a run of searches.

        Its columns are the fields of the records, those of nested objects with dots between, but
        for the nodes of searches. Of judged samples `answer` and `correct` are by the headline
        filter, and `FILTER.answer` and `FILTER.correct` by each.

        Raises:
            InputError: pandas is not installed.
        """
        ...

    def problems(self) -> "pandas.DataFrame":
        """Return a frame with a row for each problem: what it asks, and how its samples went.

        `accuracy` is the share of right samples, `top_share` that of the answer with most votes
        and `vote` the share of a right answer in the vote, all by the headline filter.

        Raises:
            InputError: pandas is not installed.
        """
        ...

    def metrics(self) -> "pandas.DataFrame":
        """Return a frame with a row for each metric, as in results.json; maj@k among them.

        Raises:
            InputError: pandas is not installed.
        """
        ...

    def nodes(self) -> "pandas.DataFrame":
        """Return a frame with a row for each node of each search tree; empty without searches.

        Raises:
            InputError: pandas is not installed.
        """
        ...

    def progress(self) -> "pandas.DataFrame":
        """Return a frame with a row for each moment that the run noted of its course.

        Raises:
            InputError: pandas is not installed.
        """
        ...


def open_frames(path: str | os.PathLike[str], *, data: str | None = None) -> RunFrames:
    """Read the run in a directory, also while it is under way; no lock is taken.

    data: where the problems are now, if they are neither where they were nor in the run's own
    directory.

    Raises:
        RunError: there is no run, or it is damaged.
        InputError: pandas is not installed, or `data` are not the problems of the run.
    """
    need_pandas()
    # By its name, because what judges samples stands above this package.
    found: RunFrames = import_module("treegen.report.run").Run(Path(path), data=data)
    return found


def need_pandas() -> Any:
    """Return pandas.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module("pandas")
    except ImportError:
        raise InputError(
            "a run as frames needs pandas; install it with: pip install 'treegen[pandas]'"
        ) from None
