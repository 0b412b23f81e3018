"""Remove runs that an error ends before they have any record."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.runs import RunDir


@contextmanager
def discard_on_error(
    runs: "Sequence[RunDir]", *, but: type[Exception] | None = None
) -> Iterator[None]:
    """Remove the runs if an error comes while all are new. Then the same can be asked again.

    Args:
        but: An error after which they stay, to be continued. Signals count as no error.
    """
    try:
        yield
    except Exception as error:
        if all_new(runs) and not (but and isinstance(error, but)):
            for run in reversed(runs):
                run.discard()
        raise


def all_new(runs: "Sequence[RunDir]") -> bool:
    """Return whether all runs were begun by this call and have no record yet."""
    return all(run.is_new for run in runs)
