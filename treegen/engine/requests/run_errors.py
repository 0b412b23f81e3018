"""Errors that end a run, with messages that tell the user what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.engine.rows.engine_run import EngineRun
from treegen.errors import (
    CapacityError,
    InternalError,
    NumericsError,
    TreegenError,
    WorkerError,
    arg,
)

_MOST_NAMED: Final = 5  # prompts in a message


def translate_error(run: EngineRun, error: Exception) -> Exception:
    """Return the error that the caller sees when `error` has ended a step."""
    if not isinstance(error, TreegenError | torch.OutOfMemoryError):
        try:
            run.executor.check()
        except WorkerError as lost:
            return lost  # the lost rank made this process fail too
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    failure = CapacityError(
        f"{run.model.device} has no memory left for a pass; leave it more beside the cache "
        f"({arg('memory=')}), or run fewer rows at a time ({arg('max_rows=')})"
    )
    failure.__cause__ = error
    return failure


def make_stall_error(run: EngineRun) -> InternalError:
    """Return the error for a run in which steps make no progress although work is left."""
    names = [repr(request.spec.id) for request in run.requests.values()]
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return InternalError(
        f"the scheduler cannot go on with prompts {', '.join(names[:_MOST_NAMED])}{more}; "
        "samples that had finished are kept; please report this with the command or program"
    )


def check_numbers(lse_S: NDArray[Any], name: Callable[[int], str]) -> None:
    """Raise NumericsError if a log-sum-exp is not finite.

    Args:
        lse_S: Log-sum-exp of each row of logits, [rows].
        name: Returns the prompt and token of a row of logits, for the message.
    """
    bad = ~np.isfinite(lse_S)
    if bad.any():
        raise NumericsError(
            f"the model's logits are not numbers for {name(int(bad.argmax()))}; "
            "samples that had finished are kept; check the weights or use dtype float32"
        )
