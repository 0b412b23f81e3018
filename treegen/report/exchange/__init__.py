"""Export of runs to the formats of other tools, and import of their logs as runs.

    export_run    a run as an Inspect log, lm-eval's files,       export.py, to_*.py
      |           those of Every Eval Ever, or Parquet
    ExportedRun   a run with its prompts, as all formats take it  export.py
    import_log    an Inspect or lm-eval log as run directories    below, from_*.py
      |
    ExternalLog   the content of a log of any tool                external_log.py

inspect_ai is imported where it is used.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from treegen.common.files import as_path, describe_read_error
from treegen.errors import InputError, arg
from treegen.report.exchange.export import FORMATS, export_run
from treegen.report.exchange.external_log import ExternalLog, make_runs
from treegen.report.exchange.from_lm_eval import is_results, newest_results, read_lm_eval

__all__ = ["FORMATS", "export_run", "import_log"]


def import_log(
    log: str | os.PathLike[str], path: str | os.PathLike[str], *, tasks: Sequence[str] | None = None
) -> list[Path]:
    """Write a log as run directories and return them, one for each task of the log.

    Args:
        log: An Inspect log (`.eval` or `.json`), or lm-eval's results: results_TIME.json with
            samples_TASK_TIME.jsonl in its folder (`--log_samples`), or that folder, of which the
            newest results are read.
        path: The directory of the run; for several tasks, the parent of the runs' directories.
        tasks: Import only these tasks of the log; None imports all.

    Raises:
        InputError: there is no log, it is not a log of either kind, it has no samples or no scores
            of correctness, or a task is missing; or inspect_ai is not installed.
        RunError: a directory is not empty, or cannot be written.
    """
    target = as_path("path", path)
    names = [] if tasks is None else tasks
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{arg('tasks')} must be a list of names, got {tasks!r:.60}")
    return make_runs(read_log(as_path("log", log), tasks), target)


def read_log(log: Path, tasks: Sequence[str] | None = None) -> list[ExternalLog]:
    """Return the content of a log, task by task; see `import_log`."""
    if not os.path.exists(log):  # Path.exists raises for names that are too long
        raise InputError(
            f"the log cannot be found: {describe_read_error(log, FileNotFoundError())}"
        )
    if log.is_dir():
        return read_lm_eval(newest_results(log), tasks)
    if log.suffix == ".jsonl":
        raise InputError(
            f"the file {log.name} contains only samples; pass its folder, or the "
            "results_TIME.json in that folder"
        )
    if log.suffix not in (".eval", ".json"):
        raise InputError(
            f"the log {log} must be an Inspect log (.eval or .json) or an lm-eval log (.json)"
        )
    if log.suffix == ".json" and is_results(log):
        return read_lm_eval(log, tasks)
    from treegen.report.exchange.from_inspect import read_inspect

    inspect_log = read_inspect(log)
    if tasks and inspect_log.task not in tasks:
        raise InputError(
            f"the log {log} contains the task {inspect_log.task}, not {', '.join(tasks)}; "
            "remove --task"
        )
    return [inspect_log]
