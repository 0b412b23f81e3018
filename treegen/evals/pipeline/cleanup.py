"""Remove runs if an error occurs before they have any record."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.runs import RunDir


@contextmanager
def discard_on_error(
    runs: "Sequence[RunDir]", *, but: type[Exception] | None = None
) -> Iterator[None]:
    """Remove the runs on an error if all of them are new, so that the same call can be repeated.

    Args:
        runs: The open runs.
        but: An error after which the runs are kept, to be resumed. Interrupts always keep them.
    """
    try:
        yield
    except Exception as error:
        if all_new(runs) and not (but and isinstance(error, but)):
            for run in reversed(runs):
                run.discard()
        raise


def all_new(runs: "Sequence[RunDir]") -> bool:
    """Return whether all runs were created by this call and have no record yet."""
    return all(run.is_new for run in runs)
