"""Settings of a run of any kind: a user's choices, which override those of a stored run.

Choices travel as a flat mapping of names to values. `merge_choices` puts a user's choices over
stored ones and checks their names and types, `build_settings` makes settings of the mapping, and
`BaseSettings` checks bounds and groups the settings for run.json.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict, TypeVar

from treegen import demo
from treegen.common.files import is_path_component
from treegen.common.spelling import suggest_argument, suggest_arguments
from treegen.errors import DataError, InputError, RunError, arg
from treegen.evals.config.type_checks import check_bounds, check_choices
from treegen.evals.registry import LM_EVAL, code_of, get_task_name, is_lm_eval
from treegen.evals.task import Task, TaskOptions
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.runs import RunInfo

_SPECULATION: Final = ("speculate", "draft_model")
# Pairs of exclusive choices: if a user gives one, the stored value of the other is dropped.
_EXCLUSIVE: Final = (("limit", "ids"), ("fewshot_file", "fewshot_data"), _SPECULATION)
# Stored paths are absolute, so that a run can be resumed and scored from any directory. In the
# second group a bare word may be a name that the task knows, such as train.
_PATHS: Final = ("model", "adapter", "chat_template", "draft_model", "fewshot_file")
_PATHS_OR_NAMES: Final = ("data", "fewshot_data")
ALLOW_TASK_CODE: Final = "allow_task_code"
"""The choice that lets a command run the code named by a stored run; it is never stored."""


@dataclass(frozen=True, kw_only=True)  # without slots, so that subclasses may have more bases
class BaseSettings(ABC):
    """Settings of a run of any kind; every default is filled in."""

    FREE: ClassVar[tuple[str, ...]]
    """The names of a subclass's own settings that change no sample."""
    RECORDED: ClassVar[tuple[str, ...]] = ()
    """The names of those that decide what is stored of a sample while it is drawn."""
    PACE: ClassVar[tuple[str, ...]] = ()
    """The names of those that only decide how fast samples are drawn."""
    COMPUTED: ClassVar[tuple[str, ...]]
    """The names of its fields that choices of other names decide."""
    CHOICES: ClassVar[tuple[str, ...]]
    """The names of these choices, and of others that are no fields."""

    task: str | Task
    """A name, path/to/file.py:Class, or an object."""
    options: TaskOptions
    """Choices about the task's data."""
    engine: EngineOptions
    """How the model is loaded and run."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @classmethod
    def choice_names(cls) -> list[str]:
        """Return the names of all choices from which such settings are made."""
        names = [name for kind in (cls, TaskOptions, EngineOptions) for name in _names(kind)]
        computed = ("options", "engine", *cls.COMPUTED)
        return [name for name in (*names, *cls.CHOICES) if name not in computed]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the settings that change a sample, as run.json groups them."""

    def explain_unused(self, name: str) -> str | None:
        """Return why the setting `name` has no effect with the others; None if it has one."""
        return None

    @property
    def runs_code(self) -> bool:
        """Whether code runs that does not come with treegen or the model."""
        return code_of(self.task) is not None

    def free_choices(self) -> dict[str, Any]:
        """Return settings that change no sample, or only data that identity has hashes of."""
        options = asdict(self.options)
        del options["seed"], options["run_dir"]
        free = {name: getattr(self, name) for name in self.FREE}
        return {"task": get_task_name(self.task), **options, **asdict(self.engine), **free}


class OpenRunOptions(TypedDict, total=False):
    """Options for opening a stored run. None and False mean "not given"."""

    data: str | None
    """Where the problems are now, if they are neither at their stored path nor in the run's own
    directory."""
    task: str | Task | None
    """Path/to/file.py:Class, or a name, of a task that does not come with treegen. Without it or
    `allow_task_code`, the code of such a task is not run."""
    allow_task_code: bool
    """Whether to run the code of the task that the run names."""


def drop_unset(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave, as choices."""
    return {name: v for name, v in choices.items() if v is not None and v is not False}


def overrides_run(options: Mapping[str, Any]) -> bool:
    """Return whether the user names the run's data or task."""
    return bool({"data", "task"} & set(drop_unset(options)))


_Settings = TypeVar("_Settings", bound=BaseSettings)


def merge_choices(
    kind: type[BaseSettings], requested: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a user's choices over stored ones, with absolute paths.

    A run may come from somebody else, so no stored choice runs code: the user must trust a model's
    code again, and name or allow a task's code. Stored devices and pipes are not read either,
    because reading may never end.

    Args:
        kind: The class of the settings that the choices are for.
        requested: The user's choices, by name.
        stored: The choices of the stored run; None for a new run.

    Raises:
        InputError: the stored task has code of its own, and the user neither names nor allows it;
            stored data are a pipe or a device; a choice has no setting; or it is not of its field's
            type.
    """
    stored = stored or {}
    _check_stored(stored, requested)
    replaced = {name for pair in _EXCLUSIVE if any(n in requested for n in pair) for name in pair}
    replaced |= {"trust_remote_code", ALLOW_TASK_CODE}
    choices = {name: value for name, value in stored.items() if name not in replaced}
    for name, value in requested.items():
        if name != ALLOW_TASK_CODE:
            choices[name] = absolute(value) if _is_path(name, value) else value
    speculates = choices.get("draft_model") is not None
    speculates = speculates or choices.get("speculate") not in (None, "off")
    if "draft_tokens" in choices and "draft_tokens" not in requested and not speculates:
        del choices["draft_tokens"]  # it has no effect any more
    _check_names(kind, choices, requested)
    typed = {name: value for name, value in choices.items() if name != "task"}
    check_choices(typed, TaskOptions, kind)
    if "extra" in requested:
        choices["extra"] = {**stored.get("extra", {}), **requested["extra"]}
    return choices


def _check_stored(stored: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise InputError if stored choices would run code or read what may never end."""
    if stored and not requested.get(ALLOW_TASK_CODE) and "task" not in requested:
        task = str(stored.get("task"))
        if code := code_of(task):
            raise InputError(
                f"the task of the run has code in {code}, and treegen does not run this code "
                f"without permission; read the code, then pass {arg('task', task)} or "
                f"{arg(ALLOW_TASK_CODE, True)}"
            )
    for name in (*_PATHS_OR_NAMES, "fewshot_file"):
        location = str(stored.get(name) or "")
        is_readable = os.path.isfile(location) or os.path.isdir(location)
        if name not in requested and os.path.exists(location) and not is_readable:
            raise InputError(
                f"the {name} of the run must be a regular file, but {location} is a pipe or a "
                f"device; pass a regular file with {arg(name + '=')}"
            )


def _is_path(name: str, value: Any) -> bool:
    """Return whether a choice may be a path, and is not a name that the task or treegen knows."""
    if name in _PATHS_OR_NAMES:
        return not str(value).isidentifier()
    return name in _PATHS and not (name in ("model", "draft_model") and value in tuple(demo.MODELS))


def _check_names(
    kind: type[BaseSettings], choices: Mapping[str, Any], requested: Mapping[str, Any]
) -> None:
    """Raise InputError for a choice that has no setting."""
    valid = [n for n in kind.choice_names() if n != "run_dir" or n not in requested]
    if unknown := sorted(name for name in choices if name not in valid):
        public = [name for name in valid if name != "run_dir"]
        hints = suggest_arguments(
            unknown,
            lambda name: suggest_argument(name, public),
            "; `help(treegen.evaluate)` and `help(treegen.search_task)` list them",
        )
        raise InputError(f"there is no setting {' and no '.join(map(repr, unknown))}{hints}")


def check_no_unused(requested: Mapping[str, Any], runs: Sequence[BaseSettings]) -> None:
    """Raise InputError for a user's choice that has no effect on any of the runs."""
    for name in requested:
        reasons = [settings.explain_unused(name) for settings in runs]
        if reasons and all(reasons):
            raise InputError(f"{arg(name + '=')} has no effect {reasons[0]}")


def build_settings(
    kind: type[_Settings], choices: Mapping[str, Any], needs_data: str, **computed: Any
) -> _Settings:
    """Return settings of a class.

    Args:
        kind: The class of the settings.
        choices: Choices by name, as `merge_choices` returns them.
        needs_data: As in `Task`.
        computed: Values of fields that are not simply the choices of the same names.

    Raises:
        InputError: no model is named, or the settings do not allow a value.
    """
    options = TaskOptions(**select(choices, _names(TaskOptions)))
    if not choices.get("model"):
        data = ""
        if needs_data and options.data is None:
            data = f"; {choices['task']} also needs {arg('data=')} with {needs_data}"
        raise InputError(
            f"no model is given; pass {arg('model=')} with a directory that save_pretrained "
            f"wrote or a model name on the Hub, or use {arg('model', 'demo')} for the bundled "
            f"model{data}"
        )
    engine = EngineOptions(**select(choices, _names(EngineOptions)))
    common = {"task": absolute_task(choices["task"]), "options": options, "engine": engine}
    return kind(**{**select(choices, _names(kind)), **common, **computed})


def select(choices: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the choices that have some names."""
    return {name: choices[name] for name in names if name in choices}


def last_choices(
    info: "RunInfo",
    command: str,
    *,
    groups: Iterable[str],
    names: Iterable[str],
    absent: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the choices of a run's start or latest resume, by name.

    Args:
        info: The content of run.json.
        command: The command that reads the run, "eval" or "search", for the message.
        groups: Names of mappings of choices in the run's identity.
        names: Names of single choices in it.
        absent: Choices that hold if an old run does not store them.

    Raises:
        RunError: the run is not one of the command's.
    """
    latest = info.resumes[-1]["free"] if info.resumes else info.free
    choices = {**latest, **(absent or {})}
    try:
        for group in groups:
            choices |= dict(info.identity[group])
        return choices | {name: info.identity[name] for name in names}
    except (KeyError, TypeError, ValueError):
        searched = isinstance(info.identity, Mapping) and "search" in info.identity
        if searched == (command == "search"):
            message = (
                "the run.json of the run was changed and has no settings for `treegen "
                f"{command}`; restore run.json from a copy"
            )
        else:
            other = "search" if searched else "eval"
            message = (
                f"the run was made by `treegen {other}`, not by `treegen {command}`; use "
                f"`treegen {other}`"
            )
        raise RunError(message) from None


def absolute_task(task: str | Task) -> str | Task:
    """Return a task or its name, with any path in the name made absolute."""
    if not isinstance(task, str):
        return task
    if is_lm_eval(task):
        name, at, location = task.partition("@")
        return f"{name}@{absolute(location)}" if task.startswith(LM_EVAL) and at else absolute(task)
    path, colon, class_name = task.rpartition(":")
    return f"{absolute(path)}:{class_name}" if colon else task


def absolute(value: Any) -> Any:
    """Return the absolute path of an existing file or directory, and any other value unchanged."""
    # Hub names and names of data sets do not change.
    value = os.fspath(value) if isinstance(value, Path) else value
    return os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else value


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


@contextmanager
def explain_moved_data(data: object) -> Iterator[None]:
    """Add to an error about the data of a run that their file may have moved.

    Args:
        data: The path that the run names, unless the user names another one; else None.
    """
    try:
        yield
    except DataError as error:
        # os.path, because a Path raises for names that are too long.
        if not isinstance(data, str) or os.path.exists(data):
            raise
        why = error.message.marked
        start = " If" if why.endswith("?") else "; if"
        raise DataError(
            f"{why}{start} the file has moved, pass its new path with {arg('data=')}"
        ) from None


def find_moved_files(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's choices, with missing files replaced by those in the run's directory.

    So a run can be given away together with its data.
    """
    choices = dict(stored)
    for name in ("data", "fewshot_file", "fewshot_data"):
        value = stored.get(name)
        # os.path, because a Path raises for names that are too long.
        if isinstance(value, str) and not os.path.exists(value):
            name_in_run = Path(value).name
            if is_path_component(name_in_run) and os.path.exists(path / name_in_run):
                choices[name] = str(path / name_in_run)
    return choices
