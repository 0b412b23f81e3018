"""Directories of evaluations and search runs: new ones, and existing ones to resume."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from treegen import demo
from treegen.common.files import file_name
from treegen.errors import InputError, Message, RunError, arg
from treegen.evals.config import eval_settings as eval_settings
from treegen.evals.config.base import BaseSettings
from treegen.evals.config.eval_settings import EvalSettings
from treegen.evals.identity import computed_on
from treegen.evals.pipeline.listener import Listener
from treegen.evals.registry import get_task, get_task_name
from treegen.evals.search import settings as search_settings
from treegen.evals.search.custom_method import short_name
from treegen.evals.search.settings import SearchSettings
from treegen.evals.task import Task
from treegen.model.options import EngineOptions
from treegen.runs import RunDir, RunInfo, SearchRunDir
from treegen.runs.directory import runs_below
from treegen.runs.files import check_directory, read_json

_Settings = TypeVar("_Settings", bound=BaseSettings)
# run.json has fingerprints of what these options load; trust_remote_code is a permission.
_CHECKED: Final = {"model", "adapter", "revision", "dtype", "quantization", "trust_remote_code"}


@dataclass(frozen=True, slots=True)
class RunTarget(Generic[_Settings]):
    """The settings and the directory of a run."""

    settings: _Settings
    path: Path
    resume: bool
    """Whether to resume an existing run."""
    is_complete: bool = False
    """Whether that run is complete."""
    info: RunInfo | None = None
    """The content of its run.json, unless the user changes an option of its model."""
    threads: str | None = None
    """The CPU threads with which it was computed; None if that is not stored."""
    late: tuple[str, ...] = ()
    """The user's choices that differ from the stored ones and do not change the stored samples;
    empty if the run has no samples."""


@dataclass(frozen=True, slots=True)
class _RunKind(Generic[_Settings]):
    """The runs of one command."""

    by: str
    """The setting in which the runs of one command differ."""
    group_word: str
    """The word for several runs in the name of their directory."""
    folder: Callable[[Any], str]
    """Returns the name of a run's folder from the value of that setting."""
    directory: type[RunDir]
    """The class of run directories."""
    resolve: Callable[..., _Settings]
    """Makes settings from a user's choices."""
    stored: Callable[..., dict[str, Any]]
    """Reads the choices of a run."""

    def begin(self, choices: Mapping[str, Any], name: str | Task | None = None) -> _Settings:
        """Return the settings of a new run.

        Args:
            choices: The user's choices.
            name: The run's task or method, if there are several.
        """
        choices = choices if name is None else {**choices, self.by: name}
        return self.resolve(demo.fill_defaults(choices, search=self.by == "method"))

    def resolve_resumed(
        self, path: Path, choices: Mapping[str, Any], *name: str | Task
    ) -> RunTarget[_Settings]:
        """Return the target that resumes the run in a directory."""
        with self.directory.open(path) as run:
            stored, identity = self.stored(run), run.info.identity
            threads = computed_on(run.info).get("threads")
            is_complete, done = run.missing <= 0, bool(run.done)
            info = None if choices.keys() & EngineOptions.__dataclass_fields__.keys() else run.info
        if "imported" in identity:
            raise RunError(
                f"{path} was imported from the log of another tool, so treegen cannot draw further "
                "samples for it; start a new run"
            )
        all_choices = {**choices, **({self.by: name[0]} if name else {})}
        if "task" in all_choices:
            task = identity["task"]["name"]
            if get_task(all_choices["task"]).name != task:
                other = get_task_name(all_choices["task"])
                message = f"{path} is a run of the task {task}, not of the task {other}"
                raise InputError(f"{message}; name another directory, or remove the task")
        settings = self.resolve(all_choices, {**stored, "run_dir": path})
        late = _changed_drawing(settings, choices, stored) if done else ()
        if is_complete and (recorded := [name for name in late if name in settings.RECORDED]):
            raise InputError(
                f"the run {path} is finished, so {arg(recorded[0] + '=')} has no effect; remove "
                f"{arg(recorded[0] + '=')}, or start a new run"
            )
        return RunTarget(settings, path, True, is_complete, info, threads, late)

    def find(
        self,
        names: Sequence[str | Task],
        choices: Mapping[str, Any],
        output: str | None,
        resume: str | None,
        *,
        several: bool,
    ) -> list[RunTarget[_Settings]]:
        """Return which runs to resume or start, and where.

        Args:
            names: The tasks or methods to run; if empty, the default.
            choices: The user's choices, by name.
            output: As for `destinations`.
            resume: As for `destinations`.
            several: Whether each run has its own directory below the path.
        """
        path = named_path(output, resume)
        if resume is not None and path is not None:
            if is_run(path):
                if several:
                    raise InputError(
                        f"{path} is the run of a single {self.by}; name one {self.by}, or use "
                        f"another path for several {self.by}s"
                    )
                return [self.resolve_resumed(path, choices, *names)]
            if targets := self.find_below(path, names, choices, required=bool(resume)):
                return targets
        settings = [self.begin(choices, name) for name in names] or [self.begin(choices)]
        folders = [self.folder(getattr(run_settings, self.by)) for run_settings in settings]
        if path is None:
            word = self.group_word if several else folders[0]
            task = () if self.by == "task" else (get_task(settings[0].task).name,)
            path = new_path(*task, word, Path(settings[0].engine.model).name)
        if len(set(folders)) < len(folders):
            raise InputError(
                f"two of the {self.by}s have the same folder: {', '.join(folders)}; run the "
                f"{self.by}s separately"
            )
        paths = [path / folder for folder in folders] if several else [path]
        _check_free(path, paths)
        return [
            RunTarget(run_settings, to, False)
            for run_settings, to in zip(settings, paths, strict=True)
        ]

    def find_below(
        self, path: Path, names: Sequence[str | Task], choices: Mapping[str, Any], *, required: bool
    ) -> list[RunTarget[_Settings]]:
        """Return the targets below a directory of several runs: those to resume or start.

        Args:
            path: The directory of the runs.
            names: The tasks or methods to run; if empty, all runs in the directory are resumed.
            choices: The user's choices, by name.
            required: Whether to raise RunError if there are no runs; otherwise the list is empty.
        """
        below = filter(is_run, path.glob("*") if os.path.isdir(path) else ())
        # In the order in which the runs were started, such as that of the compared methods.
        existing = {sub.name: sub for sub in sorted(below, key=_when_started)}
        records = self.directory.records_file
        if required and not any(os.path.exists(sub / records) for sub in existing.values()):
            # Raise RunError with the reason, such as that all runs are those of another command.
            self.directory.open(next(iter(existing.values()), path))
        if not existing or not names:
            return [self.resolve_resumed(sub, choices) for sub in existing.values()]
        targets = []
        for name in names:
            folder = self.folder(name)
            if folder in existing:
                targets.append(self.resolve_resumed(existing[folder], choices, name))
            else:
                targets.append(RunTarget(self.begin(choices, name), path / folder, False))
        return targets


def destinations(
    tasks: Sequence[str | Task], choices: Mapping[str, Any], output: str | None, resume: str | None
) -> list[RunTarget[EvalSettings]]:
    """Return which evaluations to run, and where.

    Args:
        tasks: Tasks or their names.
        choices: The user's choices, by name.
        output: The run's directory, or the parent of several; None for a new one in runs/.
        resume: A run to resume, or a directory of runs of several tasks. With "" the existing runs
            in `output` are resumed, and the others started.
    """
    return _EVAL.find(tasks, choices, output, resume, several=len(tasks) > 1)


def search_destinations(
    methods: Sequence[str],
    choices: Mapping[str, Any],
    output: str | None,
    resume: str | None,
    *,
    compare: bool,
) -> list[RunTarget[SearchSettings]]:
    """Return which searches to run, and where.

    Args:
        methods: Names of methods; if empty, the task's default.
        choices: The user's choices, by name.
        output: The run's directory, or the parent of several; None for a new one in runs/.
        resume: A run to resume, or a directory of runs that are compared. With "" the existing runs
            in `output` are resumed, and the others started.
        compare: Whether each method has its own directory below the path.
    """
    return _SEARCH.find(methods, choices, output, resume, several=compare)


def _changed_drawing(
    settings: BaseSettings, choices: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the user's choices that differ from the stored ones and only affect drawing.

    Args:
        settings: The settings of the resumed run.
        choices: The user's choices, by name.
        stored: The choices that the run stores, by name.
    """
    names = {*settings.RECORDED, *settings.PACE, *EngineOptions.__dataclass_fields__} - _CHECKED
    free = settings.free_choices()
    return tuple(name for name in choices if name in names and free[name] != stored.get(name))


def tell_late_choices(
    targets: Sequence[RunTarget[Any]], choices: Mapping[str, Any], listener: Listener
) -> None:
    """Tell the listener which choices have no effect on the samples that runs already have.

    Args:
        targets: The runs.
        choices: The user's choices, by name.
        listener: Receives the messages.
    """
    for target in targets:
        names = [name for name in target.late if name in choices]
        if target.is_complete:
            # A judge may be the run's own model, which is loaded with these options.
            is_judged = getattr(target.settings, "judged_by", None) is not None
            text = "is finished and draws no samples, so it ignores"
        else:
            is_judged = False
            names = [name for name in names if name in target.settings.RECORDED]
            text = "keeps its stored samples, which were drawn without"
        if names and not is_judged:
            options = ", ".join(arg(f"{name}=") for name in names)
            listener.tell(Message(f"{target.path} {text} {options}"))


def is_run(path: Path) -> bool:
    """Return whether a directory contains a run."""
    return os.path.exists(path / "run.json")  # Path.exists raises for names that are too long


def _when_started(run: Path) -> tuple[str, int, str]:
    """Return a key that sorts runs by their start; copies of runs have the same order."""
    document: Any = None
    with suppress(RunError):  # a corrupt file, for which resuming the run raises an error
        document = read_json(run / "run.json")
    created = document.get("created") if isinstance(document, dict) else ""
    # `created` has whole seconds, in which several short runs may start.
    return str(created), os.stat(run / "run.json").st_mtime_ns, run.name


def method_folder(method: str) -> str:
    """Return the name of the folder of a method's run; for file.py:function it is file-function."""
    return file_name(short_name(method).replace(".py:", "-"))


def named_path(output: str | None, resume: str | None) -> Path | None:
    """Return the directory that the user named; None for a new one."""
    if resume and output and Path(resume) != Path(output):
        raise InputError(
            f"{arg('resume', resume)} and {arg('output', output)} name different directories; "
            "remove one of the two arguments"
        )
    if output == "":
        raise InputError(f"{arg('output=')} is empty; name a directory, such as . for this one")
    if resume == "" and not output:
        raise InputError(
            f"{arg('resume=')} requires a run directory; name the directory, or pass "
            f"{arg('output=')}"
        )
    named = resume or output
    return None if named is None else Path(named)


def new_path(*words: str) -> Path:
    """Return a path for a new directory in runs/, unique to this process."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / "-".join(map(file_name, (*words, stamp, str(os.getpid()))))


def _check_free(path: Path, runs: Sequence[Path]) -> None:
    """Raise RunError if new runs at or below a path would be mixed with existing runs."""
    for directory in (path, *runs):
        if is_run(directory):
            raise RunError(
                f"{directory} already contains a run; continue the run with "
                f"{arg('resume', str(path))}, or use another path"
            )
        check_directory(directory)
    if path in runs and (names := runs_below(path)):
        raise RunError(
            f"{path} contains runs: {names}; continue these runs with "
            f"{arg('resume', str(path))}, or use another path"
        )


def _task_folder(task: str | Task) -> str:
    return file_name(get_task(task).name)


_EVAL: Final = _RunKind(
    "task",
    "eval",
    _task_folder,
    RunDir,
    eval_settings.resolve_eval_settings,
    eval_settings.recall_choices,
)
_SEARCH: Final = _RunKind(
    "method",
    "compare",
    method_folder,
    SearchRunDir,
    search_settings.resolve_search_settings,
    lambda run: search_settings.stored_search_choices(run.info),
)
