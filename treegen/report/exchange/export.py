"""`export_run`: a run in a format that other tools read."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, Unpack

from treegen.common.files.paths import given_path
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, RunError
from treegen.evals.config.base import OpenRunOptions
from treegen.report.exchange.exported_run import ExportedRun, read_whole
from treegen.runs.files import check_no_link, format_os_error

# Name -> the module whose `write` makes it, and the default `path` of its files below the run.
_WRITERS: Final = {
    "inspect": ("treegen.report.exchange.to_inspect", "{name}.eval"),
    "every-eval-ever": ("treegen.report.exchange.to_every_eval_ever", "every-eval-ever"),
    "lm-eval": ("treegen.report.exchange.to_lm_eval", "lm-eval"),
    "parquet": ("treegen.report.exchange.to_parquet", "parquet"),
}
FORMATS: Final = tuple(_WRITERS)


def export_run(
    run: str | os.PathLike[str],
    to: str,
    path: str | os.PathLike[str] | None = None,
    **asked: Unpack[OpenRunOptions],
) -> list[Path]:
    """Write a run in another format and return the files.

    Args:
        run: Its directory. The run may be in progress; then its finished samples are written.
        to: "inspect" (a log of Inspect AI, one `.eval` file), "every-eval-ever" (the shared schema
            of that name), "lm-eval" (results and samples as lm-evaluation-harness writes them), or
            "parquet" (tables of samples, problems, metrics and search nodes).
        path: The file of "inspect", for the others a folder; by default within the run.
        asked: data=, task= and allow_task_code=, as for `treegen.open_run`.

    Raises:
        RunError: there is no run, it is damaged or has no sample, or a file cannot be written.
        InputError: the format is not known, the run has no content for it, a package is not
            installed, or `data` or `task` are not the run's problems or task.
    """
    directory = given_path("run", run)
    if not isinstance(to, str) or to not in _WRITERS:
        hint = did_you_mean(str(to), FORMATS) or f"; known: {', '.join(FORMATS)}"
        raise InputError(f"there is no format {to!r:.60}{hint}")
    target = None if path is None else given_path("path", path)
    whole = read_whole(directory, **asked)
    module, default = _WRITERS[to]
    write: Callable[[ExportedRun, Path], list[Path]] = import_module(module).write
    if target is None:
        check_no_link(directory, target := directory / default.format(name=whole.view.name))
    try:
        return write(whole, target)
    except OSError as error:
        raise RunError(
            f"cannot write {error.filename or target}: {format_os_error(error)}"
        ) from error
