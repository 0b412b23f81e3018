"""Where the runs of one `treegen search` go, and which of them are there already."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegen import demo
from treegen.cli.destinations import file_name, is_run
from treegen.errors import InputError, RunError
from treegen.evals.search.settings import SearchSettings, settle_search, stored_choices
from treegen.runs import SearchRunDir
from treegen.tasks import get_task


@dataclass(frozen=True, slots=True)
class Target:
    """One method's settings and run directory; resume: a run is there that is to be continued."""

    settings: SearchSettings
    path: Path
    resume: bool


def targets(
    methods: Sequence[str],
    given: Mapping[str, Any],
    output_path: str | None,
    resume: str | None,
    *,
    compare: bool,
) -> list[Target]:
    """Return what is to be searched, and where.

    methods: several are compared, each in a directory of its own below the path; none is the
    task's default. resume: a run to continue, or a directory of compared ones; "" continues what
    is in output_path and begins what is not.
    """
    if resume and output_path and Path(resume) != Path(output_path):
        raise InputError(
            f"--resume {resume} and --output-path {output_path} differ; a run stays where it is"
        )
    if resume == "" and not output_path:
        raise InputError("--resume needs a run directory, or --output-path beside it")
    named = resume or output_path
    if resume is not None and named is not None:
        path = Path(named)
        if is_run(path):
            if compare:
                raise InputError(f"{path} is the run of one method; --compare needs another path")
            return [_continue(path, given, *methods)]
        there = {sub.name: sub for sub in sorted(path.glob("*")) if is_run(sub)}
        if not there and resume:
            SearchRunDir.open(path)  # says what is wrong with it
        if there and not methods:
            return [_continue(sub, given) for sub in there.values()]
        if there:
            return [
                _continue(there[method], given, method)
                if method in there
                else Target(
                    settle_search(demo.completed({**given, "method": method}, search=True)),
                    path / method,
                    False,
                )
                for method in methods
            ]
    return _begin(methods, given, None if named is None else Path(named), compare=compare)


def _begin(
    methods: Sequence[str], given: Mapping[str, Any], path: Path | None, *, compare: bool
) -> list[Target]:
    settings = [
        settle_search(demo.completed({**given, "method": method}, search=True))
        for method in methods
    ]
    settings = settings or [settle_search(demo.completed(given, search=True))]
    if path is None:
        words = (
            get_task(settings[0].task).name,
            "compare" if compare else settings[0].method,
            Path(settings[0].engine.model).name,
            time.strftime("%Y%m%d-%H%M%S"),
        )
        path = Path("runs") / "-".join(map(file_name, words))
    paths = [path / each.method for each in settings] if compare else [path]
    for each in (path, *paths):
        if is_run(each):
            raise RunError(
                f"{each} already holds a run; continue it with --resume {path}, or use another path"
            )
    return [Target(each, where, False) for each, where in zip(settings, paths, strict=True)]


def _continue(path: Path, given: Mapping[str, Any], *method: str) -> Target:
    with SearchRunDir.open(path) as run:
        stored = stored_choices(run.info)
        name = run.info.identity["task"]["name"]
    if "task" in given and get_task(str(given["task"])).name != name:
        raise InputError(f"{path} is a run of {name}, not of {given['task']}")
    asked = {**given, **({"method": method[0]} if method else {})}
    return Target(settle_search(asked, stored), path, True)
