"""Settings of a run of any kind: a user's choices, which override those of a stored run.

Choices travel as a flat mapping of names to values. `merge_choices` puts a user's choices over
stored ones, `build_settings` makes settings of the mapping, and `BaseSettings` groups the settings
for run.json.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict, TypeVar

from treegen import demo
from treegen.common.files.paths import is_path_component
from treegen.common.spelling import hint_at
from treegen.errors import InputError, RunError, arg
from treegen.evals.config.type_checks import check_choices
from treegen.evals.registry import LM_EVAL, code_of, get_task_name, is_lm_eval
from treegen.evals.task import Task, TaskOptions
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.runs import RunInfo

_GUESSING: Final = ("speculate", "draft_model")
# Pairs of exclusive choices: if a user gives one, the stored value of the other is dropped.
_EXCLUSIVE: Final = (("limit", "ids"), ("fewshot_file", "fewshot_data"), _GUESSING)
# Stored paths are absolute, so that a run can be resumed and scored from any directory. In the
# second group a bare word may be a name that the task knows, such as train.
_PATHS: Final = ("model", "adapter", "draft_model", "fewshot_file")
_PATHS_OR_NAMES: Final = ("data", "fewshot_data")
ALLOW_TASK_CODE: Final = "allow_task_code"
"""The choice that lets a command run the code named by a stored run; it is never stored."""


@dataclass(frozen=True, kw_only=True)  # without slots, so that subclasses may have more bases
class BaseSettings(ABC):
    """Settings of a run of any kind; every default is filled in.

    FREE: the names of a subclass's own settings that change no sample.
    task: a name, path/to/file.py:Class, or an object.
    options: choices about the task's data.
    engine: how the model is loaded and run.
    """

    FREE: ClassVar[tuple[str, ...]]

    task: str | Task
    options: TaskOptions
    engine: EngineOptions

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
        del options["seed"], options["kept"]
        free = {name: getattr(self, name) for name in self.FREE}
        return {"task": get_task_name(self.task), **options, **asdict(self.engine), **free}


class OpenRunOptions(TypedDict, total=False):
    """Options for opening a stored run. None and False mean "not given".

    data: where the problems are now, if they are neither at their stored path nor in the run's own
    directory.
    task: path/to/file.py:Class, or a name, of a task that does not come with treegen. Without it or
    `allow_task_code`, the code of such a task is not run.
    allow_task_code: whether to run the code of the task that the run names.
    """

    data: str | None
    task: str | Task | None
    allow_task_code: bool


def drop_unset(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave, as choices."""
    return {name: v for name, v in asked.items() if v is not None and v is not False}


def overrides_run(asked: Mapping[str, Any]) -> bool:
    """Return whether the user names the run's data or task."""
    return bool({"data", "task"} & set(drop_unset(asked)))


_Choices = TypeVar("_Choices", bound=BaseSettings)


def merge_choices(
    kind: type[BaseSettings], asked: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a user's choices over stored ones, with absolute paths.

    A run may come from somebody else, so no stored choice runs code: the user must trust a model's
    code again, and name or allow a task's code. Stored devices and pipes are not read either,
    because reading may never end.

    Args:
        kind: The class of the settings that the choices are for.
        asked: The user's choices, by name.
        stored: The choices of the stored run; None for a new run.

    Raises:
        InputError: the stored task has code of its own, and the user neither names nor allows it;
        stored data are a pipe or a device; or a choice is not of its field's type.
    """
    if "kept" in asked:  # it follows from the run's directory
        raise InputError("there is no setting 'kept'")
    choices: dict[str, Any] = dict(stored or {})
    choices.pop("trust_remote_code", None)
    asked = dict(asked)
    allowed = asked.pop(ALLOW_TASK_CODE, False)
    if stored and not allowed and "task" not in asked:
        task = str(stored.get("task"))
        if code := code_of(task):
            raise InputError(
                f"the run names a task with code of its own, {code}, which does not run unasked; "
                f"read it, then name it ({arg('task', task)}) or give "
                f"{arg('allow_task_code', True)}"
            )
    for name in (*_PATHS_OR_NAMES, "fewshot_file"):
        place = str(choices.get(name) or "")
        if name not in asked and os.path.exists(place) and not _holds_data(place):
            raise InputError(
                f"the run names {place} as its {name}, which is a pipe or a device; name the file "
                f"that was meant ({arg(name + '=')})"
            )
    for pair in _EXCLUSIVE:
        if any(name in asked for name in pair):
            for name in pair:
                choices.pop(name, None)
    for name, value in asked.items():
        is_name = name in _PATHS_OR_NAMES and str(value).isidentifier()
        is_name = is_name or (name in ("model", "draft_model") and value == demo.NAME)
        is_path = name in (*_PATHS, *_PATHS_OR_NAMES) and not is_name
        choices[name] = absolute(value) if is_path else value
    guesses = choices.get("draft_model") is not None or choices.get("speculate") not in (
        None,
        "off",
    )
    if not guesses and "draft_tokens" not in asked:
        choices.pop("draft_tokens", None)  # it has no effect any more
    check_choices(
        {n: v for n, v in choices.items() if n not in _names(BaseSettings)}, TaskOptions, kind
    )
    if "extra" in asked:
        choices["extra"] = {**(stored or {}).get("extra", {}), **asked["extra"]}
    return choices


def check_no_unused(asked: Mapping[str, Any], runs: Sequence[BaseSettings]) -> None:
    """Raise InputError for a user's choice that has no effect on any of the runs."""
    for name in asked:
        reasons = [settings.explain_unused(name) for settings in runs]
        if reasons and all(reasons):
            raise InputError(f"{arg(name + '=')} is of no use {reasons[0]}")


def build_settings(
    kind: type[_Choices],
    given: dict[str, Any],
    chosen: Mapping[str, Any],
    *,
    data: Mapping[str, Any],
    also: Iterable[str],
) -> _Choices:
    """Return settings of a class from the choices in `given`, and remove them from `given`.

    Args:
        kind: The class of the settings.
        given: Choices by name, as `merge_choices` returns them.
        chosen: Values of fields that are known already.
        data: Values of fields of the task's options that are known already.
        also: Further names that users may give, for hints.

    Raises:
        InputError: no model is named, a name is unknown, or the settings do not allow a value.
    """
    task = absolute_task(given.pop("task"))
    options = TaskOptions(**_take(given, _names(TaskOptions)), **data)
    if not given.get("model"):
        raise InputError(
            f"no model is given; name one with {arg('model=')}: a directory made by "
            f"save_pretrained, a hub name, or {arg('model', 'demo')} for the small one that comes "
            "with treegen"
        )
    engine = EngineOptions(**_take(given, _names(EngineOptions)))
    values: dict[str, Any] = {"task": task, "options": options, "engine": engine, **chosen}
    further = _take(given, [name for name in _names(kind) if name not in values])
    settings = kind(**values, **further)
    if given:
        known = [name for source in (kind, TaskOptions, EngineOptions) for name in _names(source)]
        hint = hint_at(min(given), [*known, *also])
        hint = hint or "; `help(treegen.evaluate)` and `help(treegen.search)` list them"
        raise InputError(f"there is no setting {min(given)!r}{hint}")
    return settings


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
                f"its run.json lacks settings of `treegen {command}`: it was changed; "
                "restore it from a copy"
            )
        else:
            other = "search" if searched else "eval"
            message = (
                f"it is a run of `treegen {other}`, not of `treegen {command}`; use the former"
            )
        raise RunError(message) from None


def absolute_task(task: str | Task) -> str | Task:
    """Return a task or its name, with any path in the name made absolute."""
    if not isinstance(task, str):
        return task
    if is_lm_eval(task):
        name, at, place = task.partition("@")
        return f"{name}@{absolute(place)}" if task.startswith(LM_EVAL) and at else absolute(task)
    path, colon, class_name = task.rpartition(":")
    return f"{absolute(path)}:{class_name}" if colon else task


def absolute(value: Any) -> Any:
    """Return the absolute path of an existing file or directory, and any other value unchanged."""
    # Hub names and names of data sets do not change.
    value = os.fspath(value) if isinstance(value, Path) else value
    return os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else value


def _holds_data(place: str) -> bool:
    return os.path.isfile(place) or os.path.isdir(place)


def _take(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove the entries with these names from `given` and return them."""
    return {name: given.pop(name) for name in names if name in given}


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


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
