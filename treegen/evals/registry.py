"""Find a task by its name, by an installed package's entry point, or in a Python file."""

import hashlib
import inspect
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, ModuleType
from typing import Any, Final

from treegen import demo
from treegen.common.files import describe_read_error
from treegen.common.formatting import safe_text
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, TreegenError, arg
from treegen.evals.task import Task, TaskDefaults
from treegen.evals.verdict import AnswerType

ENTRY_POINT_GROUP: Final = "treegen.tasks"
LM_EVAL: Final = "lm-eval:"
"""The prefix of names of lm-evaluation-harness tasks."""

# The classes of the tasks that come with treegen. A module is imported when its task is used.
_BUILTIN: Final = {
    "aime": "treegen.tasks.math.competitions:AIME",
    "apps": "treegen.tasks.apps.task:APPS",
    "arc-challenge": "treegen.tasks.choices:ARCChallenge",
    "arc-easy": "treegen.tasks.choices:ARCEasy",
    "chartqa": "treegen.tasks.vision.documents:ChartQA",
    "countdown": "treegen.tasks.puzzles.base:Countdown",
    "docvqa": "treegen.tasks.vision.documents:DocVQA",
    "game24": "treegen.tasks.puzzles.game24:Game24",
    "gpqa": "treegen.tasks.gpqa:GPQA",
    "gsm8k": "treegen.tasks.gsm8k:GSM8K",
    "harbor": "treegen.tasks.agents.harbor_task:Harbor",
    "hellaswag": "treegen.tasks.choices:HellaSwag",
    "hmmt": "treegen.tasks.math.competitions:HMMT",
    "humaneval": "treegen.tasks.code.humaneval:HumanEval",
    "humaneval-plus": "treegen.tasks.code.plus:HumanEvalPlus",
    "ifeval": "treegen.tasks.ifeval.task:IFEval",
    "imported": "treegen.tasks.imported:Imported",
    "jsonl": "treegen.tasks.jsonl:QuestionAnswer",
    "livecodebench": "treegen.tasks.code.livecodebench:LiveCodeBench",
    "math": "treegen.tasks.math.task:Math",
    "math500": "treegen.tasks.math.task:Math500",
    "mbpp": "treegen.tasks.code.mbpp:MBPP",
    "mbpp-plus": "treegen.tasks.code.plus:MBPPPlus",
    "mmlu": "treegen.tasks.mmlu.task:MMLU",
    "mmlu-generate": "treegen.tasks.mmlu.task:MMLUGenerate",
    "mmmu": "treegen.tasks.vision.mmmu:MMMU",
    "mmmu-pro": "treegen.tasks.vision.mmmu:MMMUPro",
    "needle": "treegen.tasks.needle.task:Needle",
    "needle-grid": "treegen.tasks.needle.grid:NeedleGrid",
    "piqa": "treegen.tasks.choices:PIQA",
    "ruler-niah-multikey-1": "treegen.tasks.needle.ruler:MultiKey1",
    "ruler-niah-multikey-2": "treegen.tasks.needle.ruler:MultiKey2",
    "ruler-niah-multikey-3": "treegen.tasks.needle.ruler:MultiKey3",
    "ruler-niah-multiquery": "treegen.tasks.needle.ruler:MultiQuery",
    "ruler-niah-multivalue": "treegen.tasks.needle.ruler:MultiValue",
    "ruler-niah-single-1": "treegen.tasks.needle.ruler:Single1",
    "ruler-niah-single-2": "treegen.tasks.needle.ruler:Single2",
    "ruler-niah-single-3": "treegen.tasks.needle.ruler:Single3",
    "repair": "treegen.tasks.agents.tasks:RepairTask",
    "simpleqa": "treegen.tasks.simpleqa:SimpleQA",
    "text-world": "treegen.tasks.agents.tasks:TextWorldTask",
    "winogrande": "treegen.tasks.choices:WinoGrande",
}

_LM_EVAL_TASK: Final = "treegen.tasks.lm_eval.task:LmEvalTask"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task that a name finds."""

    name: str
    target: str
    """The place of its class, "module:Class"."""
    source: str
    """The package that it comes from."""


def list_tasks() -> list[TaskInfo]:
    """Return every known task, built-in tasks first, then by name, without importing any."""
    infos = [TaskInfo(name, target, "treegen") for name, target in sorted(_BUILTIN.items())]
    for point in sorted(_entry_points(), key=lambda point: point.name):
        if point.name not in _BUILTIN:
            package = point.dist.name if point.dist else "an installed package"
            infos.append(TaskInfo(point.name, point.value, package))
    return infos


def describe_tasks(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the version, defaults and arguments of tasks as JSON objects.

    Args:
        names: Names of tasks, as for `get_task`. If empty, all known tasks are described, and a
            task that cannot be loaded has an error instead: a broken package must not hide the
            other tasks.

    Raises:
        InputError: a named task does not exist or cannot be loaded.
    """
    documents: list[dict[str, Any]] = []
    infos = list_tasks()
    if names:
        by_name = {info.name: info for info in infos}
        named = [(name, get_task_name(get_task(name))) for name in names]
        infos = [by_name.get(name, TaskInfo(name, place, "a file")) for name, place in named]
    for info in infos:
        document = {"name": info.name, "source": info.source, "target": info.target}
        try:
            task = get_task(info.name)
        except TreegenError as error:
            documents.append({**document, "error": safe_text(" ".join(str(error).split()))})
            continue
        defaults = task.defaults
        documents.append(
            {
                **document,
                "version": task.version,
                "filters": list(task.filters),
                "num_fewshot": defaults.num_fewshot,
                "num_samples": defaults.num_samples,
                "temperature": defaults.sampling.temperature,
                "max_tokens": defaults.sampling.max_tokens,
                "arguments": _describe_arguments(task),
            }
        )
    return documents


def _describe_arguments(task: Task) -> dict[str, str]:
    """Return what the task's arguments mean, and their values with the bundled model."""
    values = demo.task_arguments(task.name)
    return {
        name: f"{meaning}; with the bundled model: {values[name]}" if name in values else meaning
        for name, meaning in task.arguments.items()
    }


def get_task(name: str | Task) -> Task:
    """Return a new task for a name, or the task that is passed.

    Args:
        name: A known name, `path/to/file.py:ClassName`, `lm-eval:TASK` for a task or group of
            lm-eval, `lm-eval:TASK@DIR` for a task in a folder of its YAML files,
            `path/to/task.yaml`, or a task.

    Raises:
        InputError: there is no such task, it cannot be loaded, or it is not a task.
    """
    if isinstance(name, list | tuple) or hasattr(name, "score_stream"):
        raise InputError(
            f"{arg('task')} must be the name of a task or a task, got {name!r:.60}; pass one task "
            "first, and then the model"
        )
    if not isinstance(name, str):
        return _create_task(lambda: name, type(name).__name__)
    if is_lm_eval(name):
        task: Task = resolve_name(_LM_EVAL_TASK)(name)
        return task
    path, colon, class_name = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _create_task(load_member(Path(path), class_name, "class", inspect.isclass), name)
    if name.endswith(".py"):
        raise InputError(f"the task {name} must include the name of a class; use {name}:ClassName")
    if name in _BUILTIN:
        return _create_task(resolve_name(_BUILTIN[name]), name)
    for point in _entry_points():
        if point.name == name:
            return _create_task(_load_point(point), name)
    if name.endswith((".jsonl", ".json", ".csv", ".parquet")):
        raise InputError(
            f"there is no task {name!r}; to ask the questions of a file, use the task jsonl with "
            f"{arg('data', name)}"
        )
    names = [info.name for info in list_tasks()]
    hint = did_you_mean(name, names) or f"; known: {', '.join(names)}, or path/to/file.py:Class"
    raise InputError(f"there is no task {name!r}{hint}")


def is_builtin_task(name: str | Task) -> bool:
    """Return whether a name is that of a task that comes with treegen."""
    return isinstance(name, str) and name in _BUILTIN


def is_lm_eval(name: str) -> bool:
    """Return whether a name refers to an lm-eval task, or to a YAML file in its format."""
    return name.startswith(LM_EVAL) or name.endswith((".yaml", ".yml"))


def get_task_name(task: str | Task) -> str:
    """Return the name by which `get_task` finds a task in another process, if it can.

    A class in a file is named by its path. A class that a notebook defines is only described.
    """
    if isinstance(task, str):
        return task
    kind = type(task)
    if isinstance(task, Task) and task.place is not None:
        return task.place
    target = f"{kind.__module__}:{kind.__qualname__}"
    for info in list_tasks():
        if info.target == target:
            return info.name
    try:
        file = inspect.getfile(kind)
    except (TypeError, OSError):
        file = ""
    if file.endswith(".py") and kind.__qualname__.isidentifier():
        return f"{os.path.abspath(file)}:{kind.__qualname__}"
    return f"{kind.__qualname__} of a notebook"


def code_of(name: str | Task) -> str | None:
    """Return the code that loading a task would run; None if the task comes with treegen.

    This imports nothing.
    """
    if not isinstance(name, str):
        return None  # the task is already loaded
    if is_lm_eval(name):
        # Templates and functions of YAML files may do anything. lm-eval's own belong to a library.
        _, at, location = name.partition("@")
        return ((location or ".") if at else None) if name.startswith(LM_EVAL) else name
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        return path
    for point in _entry_points() if name not in _BUILTIN else ():
        if point.name == name:
            return f"{point.value} of {point.dist.name if point.dist else 'an installed package'}"
    return None


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load_point(point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"cannot load task {point.name!r} ({point.value}): {format_error(error)}; fix the "
            "code of the task"
        ) from error


class _UncachedLoader(SourceFileLoader):
    """Runs the present source of a file, not the bytecode in its `__pycache__`.

    Python takes that bytecode as current if the size and the second of the last change are the
    same.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_file(path: Path) -> ModuleType:
    """Run a Python file anew and return its module.

    Raises:
        InputError: it cannot be run.
    """
    if path.suffix != ".py":
        raise InputError(f"{path} cannot be imported; name a file that ends in .py")
    # Files with the same stem in different folders are different modules.
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]
    name = f"treegen_task_{path.stem}_{digest}"
    spec = spec_from_file_location(name, path, loader=_UncachedLoader(name, os.fspath(path)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses look up their module in sys.modules while they are created.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"cannot load {path}: {format_error(error)}; fix the file") from error
    return module


def load_member(path: Path, name: str, kind: str, is_kind: Callable[[object], bool]) -> Any:
    """Run a Python file anew and return one of its members.

    Args:
        path: The file.
        name: The name of the member.
        kind: Word for such a member in errors: "class" or "function".
        is_kind: Whether an object is such a member, to suggest names.

    Raises:
        InputError: the file cannot be run, or has no such member.
    """
    if not path.is_file():
        raise InputError(describe_read_error(path, FileNotFoundError()))
    module = load_file(path)
    member = getattr(module, name, None)
    if member is None:
        names = [
            key
            for key, value in vars(module).items()
            if is_kind(value) and getattr(value, "__module__", "") == module.__name__
        ]
        others = f"; names in the file: {', '.join(names) or 'none'}"
        raise InputError(f"{path} has no {kind} {name!r}{did_you_mean(name, names) or others}")
    return member


def _create_task(factory: object, name: str) -> Task:
    if inspect.iscoroutinefunction(factory):
        raise InputError(
            f"{name!r} is not a task but an async function, such as a search method; did you mean "
            f"{arg('method', name)}?"
        )
    if not callable(factory):
        raise InputError(f"{name!r} must be the class of a task, got {factory!r:.40}")
    try:
        instance = factory()
        missing = find_missing(instance, Task)
        task: Task | None = None if missing else adapt_task(instance, Task)
        wrong = _describe_fault(task) if task else ""
    except (Exception, SystemExit) as error:
        raise InputError(
            f"cannot create task {name!r}: {format_error(error)}; fix the code of the task"
        ) from error
    if task is None:
        raise InputError(
            f"{name!r} is not a task: it has no {', '.join(missing)}; inherit from "
            "treegen.tasks.Task, and define these members"
        )
    if wrong:
        raise InputError(f"{name!r} is not a task: {wrong}")
    return task


def find_missing(task: object, base: ABCMeta) -> list[str]:
    """Return the required members of a base class that a task lacks."""
    members = (name for kind in reversed(base.__mro__) for name in vars(kind))
    required = (name for name in members if name in base.__abstractmethods__)
    return [name for name in required if not hasattr(task, name)]


def adapt_task(task: object, base: ABCMeta) -> Any:
    """Return a task as an instance of a base class; it has all required members.

    A task whose class does not inherit from `base` is wrapped: its own members are read from it,
    and the optional members that it lacks have the defaults of `base`.
    """
    if isinstance(task, base):
        return task

    def delegate(name: str) -> property:
        return property(lambda self: getattr(task, name))

    kind = type(task)
    members = {name: delegate(name) for name in dir(task) if not name.startswith("_")}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (base,), {**members, **names})()


def _describe_fault(task: Task) -> str:
    """Return what is wrong with the members of a task, or ""."""
    for member in ("name", "version"):
        value = getattr(task, member)
        if not isinstance(value, str) or not value:
            return f"its {member} must be text, such as '1', got {value!r:.60}"
    filters = task.filters
    listed = isinstance(filters, list | tuple) and all(isinstance(f, str) and f for f in filters)
    if not listed or not filters or len(set(filters)) < len(filters):
        return f"its filters must be a tuple of different names, got {filters!r:.60}"
    if not isinstance(task.defaults, TaskDefaults):
        return f"its defaults must be TaskDefaults, got {task.defaults!r:.60}"
    if not isinstance(task.arguments, Mapping):
        return (
            "its arguments must be a mapping from each name to one line of help, got "
            f"{task.arguments!r:.60}"
        )
    types = task.answer_types
    if not isinstance(types, Mapping) or not set(types) <= set(filters):
        return f"its answer_types must be a mapping from filters to types, got {types!r:.60}"
    for name, kind in types.items():
        if not isinstance(kind, AnswerType):
            return f"its answer type for {name} must have the methods verdict and representatives"
    if task.executes_code and type(task).open_scoring is Task.open_scoring:
        return "its executes_code is True, so it must also define the method open_scoring"
    return ""


def format_error(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
