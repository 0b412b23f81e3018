"""Check and report how the weights loaded: which were missing, mismatched or unused."""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from transformers.utils import logging as transformers_logging

from treegen.common.formatting import summarize_error
from treegen.errors import ModelError, ModelWarning

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_MAX_SHOWN: Final = 3


class _LogCapture(logging.Handler):
    """A log handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's lines, without colours."""
        self.lines += _COLOURS.sub("", record.getMessage()).splitlines()


@contextmanager
def quiet_loading() -> Iterator[list[str]]:
    """While open, hide transformers' progress bars and report. Yield the report's lines so far."""
    logger = logging.getLogger("transformers.modeling_utils")
    capture = _LogCapture()
    before = logger.propagate, logger.level, transformers_logging.is_progress_bar_enabled()
    logger.addHandler(capture)
    logger.propagate = False
    # At level WARNING, transformers searches for layers that tensor parallelism would not shard.
    logger.setLevel(logging.WARNING - 1)
    transformers_logging.disable_progress_bar()
    try:
        yield capture.lines
    finally:
        logger.removeHandler(capture)
        logger.propagate = before[0]
        logger.setLevel(before[1])
        if before[2]:
            transformers_logging.enable_progress_bar()


def loading_error(directory: Path, error: Exception, report_lines: list[str]) -> ModelError:
    """Return the ModelError for weights that could not be loaded.

    Args:
        directory: The checkpoint's directory.
        error: The error of transformers.
        report_lines: The lines of transformers' report.
    """
    # If tensors could not be combined, transformers' error only refers to its report.
    rows = [line for line in report_lines if "CONVERSION" in line]
    name = rows[0].split("|")[0].strip() if rows else ""
    if name:
        return ModelError(
            f"the weights in {directory} do not fit config.json: {name} cannot be built from "
            "the tensors of the checkpoint; download config.json and the weights again, or "
            "update transformers"
        )
    return ModelError(
        f"the weights in {directory} cannot be loaded: {summarize_error(error)}; download "
        "them again"
    )


def check_complete(directory: Path, info: Mapping[str, Any]) -> None:
    """Raise ModelError if the checkpoint lacks weights, which transformers would fill at random."""
    wrong = sorted(tuple(mismatch) for mismatch in info["mismatched_keys"])
    if wrong:
        name, stored, expected = wrong[0]
        more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise ModelError(
            f"the weights in {directory} do not fit config.json: {name} has shape "
            f"{list(stored)}, but the configuration requires {list(expected)}{more}; download "
            "config.json and the weights again"
        )
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ModelError(
            f"the weights in {directory} have no {missing[0]}{more}; download the checkpoint "
            "and its config.json again"
        )


def format_names(names: Sequence[str]) -> str:
    """Format the first of some names as text, and the number of the others."""
    more = f" and {len(names) - _MAX_SHOWN:,} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}"


def warn_unused(directory: Path, names: Iterable[str]) -> None:
    """Warn about weights, by their names, that this configuration has no place for."""
    extra = sorted(map(str, names))
    if not extra:
        return
    warnings.warn(
        f"{directory}: {len(extra):,} tensors of the checkpoint are not used, because the model "
        f"that config.json describes does not have them: {format_names(extra)}",
        ModelWarning,
        stacklevel=1,
    )
