"""Where the runs of one `treegen eval` go, and which of them are there already."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegen import demo
from treegen.errors import InputError, RunError
from treegen.evals.settings import EvalSettings, settle, stored_choices
from treegen.runs import RunDir
from treegen.tasks import get_task


@dataclass(frozen=True, slots=True)
class Destination:
    """One task's settings and run directory; resume: a run is there that is to be continued."""

    settings: EvalSettings
    path: Path
    resume: bool


def destinations(
    tasks: Sequence[str], given: Mapping[str, Any], output_path: str | None, resume: str | None
) -> list[Destination]:
    """Return what is to be run, and where.

    resume: a run to continue, or a directory of runs of several tasks; "" continues what is in
    output_path and begins what is not.
    """
    if resume is None:
        return _begin(tasks, given, None if output_path is None else Path(output_path))
    if resume and output_path and Path(resume) != Path(output_path):
        raise InputError(
            f"--resume {resume} and --output-path {output_path} differ; a run stays where it is"
        )
    if not resume and not output_path:
        raise InputError("--resume needs a run directory, or --output-path beside it")
    path = Path(resume or output_path or "")
    if is_run(path):
        if len(tasks) > 1:
            raise InputError(f"{path} is the run of one task, but {len(tasks)} are named")
        return [_continue(path, given, *tasks)]
    runs = sorted(sub for sub in path.glob("*") if is_run(sub))
    if not runs and resume:
        RunDir.open(path)  # says what is wrong with it
    if not runs:
        return _begin(tasks, given, path)
    if not tasks:
        return [_continue(sub, given) for sub in runs]
    found = []
    for task in tasks:
        sub = path / file_name(get_task(task).name)
        if is_run(sub):
            found.append(_continue(sub, given, task))
        else:
            found.append(
                Destination(settle(demo.completed({**given, "task": task})), sub, resume=False)
            )
    return found


def _begin(tasks: Sequence[str], given: Mapping[str, Any], path: Path | None) -> list[Destination]:
    settings = [settle(demo.completed({**given, "task": task})) for task in tasks] or [
        settle(given)
    ]
    names = [file_name(get_task(each.task).name) for each in settings]
    if path is None:
        model = file_name(Path(settings[0].engine.model).name)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        first = names[0] if len(names) == 1 else "eval"
        path = Path("runs") / f"{first}-{model}-{stamp}"
    if len(set(names)) < len(names):
        raise InputError(f"two of the tasks have the same name: {', '.join(names)}")
    paths = [path] if len(names) == 1 else [path / name for name in names]
    for each in paths:
        if is_run(each):
            raise RunError(
                f"{each} already holds a run; continue it with --resume {path}, or use another path"
            )
    return [
        Destination(each, where, resume=False) for each, where in zip(settings, paths, strict=True)
    ]


def _continue(path: Path, given: Mapping[str, Any], *task: str) -> Destination:
    with RunDir.open(path) as run:
        stored = stored_choices(run.info)
    asked = {**given, **({"task": task[0]} if task else {})}
    return Destination(settle(asked, stored), path, resume=True)


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run."""
    return (path / "run.json").exists()


def file_name(text: str) -> str:
    """Return a text as a name that is safe in any directory."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip(".")[:80] or "unnamed"
