"""Lists lm-eval's tasks, and loads them quietly, with its seeds and with helpful errors."""

import io
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Final

from treegen.common.files import describe_read_error
from treegen.common.spelling import did_you_mean
from treegen.errors import DataError, InputError, arg, install
from treegen.evals.registry import LM_EVAL
from treegen.tasks.lm_eval.index import index_of, index_with, own_index

KINDS: Final = ("generate_until", "multiple_choice", "loglikelihood", "loglikelihood_rolling")
_SEED, _NUMPY_SEED = 0, 1234


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks and groups of a name."""

    name: str
    """Name of the task, group or tag."""
    leaves: Mapping[str, Any]
    """Its tasks, by name."""
    groups: tuple[Any, ...]
    """Its groups, outer ones first."""


def lm_eval_version() -> str:
    """Return the version of lm-eval; raise InputError if it is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise InputError(
            f"tasks of lm-eval need it; install it with: {install('lm-eval')}"
        ) from None
    return version("lm-eval")


@lru_cache(maxsize=4)
def load_tasks(name: str) -> LoadedTasks:
    """Return the tasks of `lm-eval:TASK`, `lm-eval:TASK@DIR` or `path/to/task.yaml`.

    Loading a task also loads its data, from the hub if they are there.

    Raises:
        InputError: There is no such task, or it cannot be made or run here.
        DataError: The data of the task cannot be loaded.
    """
    lm_eval_version()
    wanted, index = _entry(name)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    manager._index = index
    with quiet(), use_default_seeds(), _no_metric_of_this_folder():
        try:
            loaded = manager.load(wanted)
        except InputError:
            raise
        except Exception as error:
            raise _failure(error, wanted) from error
    leaves = dict(loaded["tasks"])
    for leaf, task in leaves.items():
        _check(leaf, task)
    return LoadedTasks(wanted, leaves, tuple(_outer_first(loaded["groups"].values())))


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    """Return the requested task's name in the index, and the index."""
    if not name.startswith(LM_EVAL):
        path = Path(name)
        if not path.is_file():
            raise InputError(describe_read_error(path, FileNotFoundError()))
        path = path.absolute()
        entry = next((e for e in index_of([path]).values() if e.yaml_path == path), None)
        if entry is None:
            raise InputError(
                f"{path} is not a task of lm-eval: it needs a line such as `task: my_task`, or "
                "`group:` above a list of tasks"
            )
        index = index_with(path)
        _check_safe(entry.name, entry)
        return entry.name, {**index, entry.name: entry}
    wanted, at, place = name.removeprefix(LM_EVAL).partition("@")
    index = _index_with_folder(place if at else None)
    if wanted not in index:
        hint = did_you_mean(wanted, index) or "; `treegen tasks --lm-eval PATTERN` lists them"
        raise InputError(f"lm-eval has no task {wanted!r}{hint}")
    _check_safe(wanted, index[wanted])
    return wanted, index


def _index_with_folder(place: str | None) -> dict[str, Any]:
    """Return the index of lm-eval's own tasks, and of the tasks in a folder if it is not None."""
    if place is None:
        return dict(own_index())
    if not (place and Path(place).is_dir()):  # Path("") would be the working directory
        raise InputError(
            f"{place!r} is not a folder; pass a folder with YAML files of tasks to "
            f"{arg('include_path=')}"
        )
    return index_with(Path(place))


def _check_safe(name: str, entry: Any) -> None:
    """Raise InputError for a task that runs programs, before any of its code is imported."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config: Mapping[str, Any] = {}
    if entry.yaml_path is not None:
        with suppress(Exception):  # an unreadable file is reported when the task is made
            config = load_yaml(entry.yaml_path, resolve_func=False)
    if config.get("unsafe_code"):
        raise _unsafe(name)


@contextmanager
def _no_metric_of_this_folder() -> Iterator[None]:
    """Reject metrics that `evaluate` would load from the working directory.

    For a task that names the hub's metric accuracy, `evaluate` would import ./accuracy/accuracy.py
    if this file exists. A task's own functions call it too, also later during scoring, so metrics
    that are found by name alone stay rejected.
    """
    from lm_eval.api import task
    from lm_eval.api.registry import metric_registry

    programs = chain(Path().glob("*/*.py"), Path().glob("*/*/*.py"))
    if any(path.stem == path.parent.name for path in programs):
        _guard_evaluate()  # only if needed, because importing evaluate takes seconds
    before = task.get_metric

    def get_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in metric_registry:
            _check_metric(name)  # lm-eval would continue without a metric that it cannot load
        return before(name, hf_evaluate_metric)

    task.get_metric = get_metric
    try:
        yield
    finally:
        task.get_metric = before


@cache
def _guard_evaluate() -> None:
    try:
        from evaluate import loading
    except ImportError:  # then no task can call it
        return
    before = loading.evaluation_module_factory

    def factory(path: str, *args: Any, **kwargs: Any) -> Any:
        _check_metric(path)
        return before(path, *args, **kwargs)

    loading.evaluation_module_factory = factory


def _check_metric(name: str) -> None:
    """Raise InputError for a metric's name, not a path, that matches a program of this folder."""
    program = Path(name) / f"{Path(name).name}.py"
    if not name.startswith((".", "/")) and not name.endswith(".py") and program.exists():
        raise InputError(
            f"the task asks for the hub's metric {name}, but lm-eval would run {program} in the "
            "working directory instead; run the command in another directory, or rename the "
            "file"
        )


def _unsafe(name: str) -> InputError:
    return InputError(
        f"lm-eval's {name} runs programs that the model wrote, without a sandbox; treegen's own "
        "humaneval, mbpp, apps and livecodebench run them in a sandbox"
    )


def _check(name: str, task: Any) -> None:
    """Raise InputError for a task that cannot be run here."""
    if getattr(task, "UNSAFE_CODE", False):
        raise _unsafe(name)
    if task.get_config("doc_to_audio"):
        raise InputError(f"lm-eval's {name} uses sound, which treegen does not support")
    if getattr(task, "MULTIMODAL", False) and task.OUTPUT_TYPE != "generate_until":
        raise InputError(
            f"lm-eval's {name} scores given texts after images, but with images, treegen only "
            "generates answers; use a task of the type generate_until"
        )


def _failure(error: Exception, name: str) -> InputError | DataError:
    if isinstance(error, ImportError):
        missing = f"; install {error.name}" if error.name else ""
        return InputError(f"lm-eval's {name} needs a package: {format_error(error)}{missing}")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    reason = format_error(error)
    if kinds & {
        "DatasetNotFoundError",
        "DataFilesNotFoundError",
        "ConnectionError",
        "OfflineModeIsEnabled",
        "HfHubHTTPError",
        "LocalEntryNotFoundError",
        "FileNotFoundError",
    }:
        return DataError(
            f"the data of lm-eval's {name} are not on this machine: {reason}; run the task once "
            "with access to the Hugging Face hub, or name your own data in a YAML file with "
            "dataset_path: json"
        )
    return InputError(f"lm-eval cannot make its task {name}: {reason}")


def format_error(error: BaseException) -> str:
    """Return the type and message of an error on one line, at most 600 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


def _outer_first(groups: Any) -> list[Any]:
    """Return groups in an order in which each is before the groups in it."""
    from lm_eval.evaluator_utils import _collect_groups_bottom_up

    ordered: list[Any] = _collect_groups_bottom_up({group.name: group for group in groups})
    return ordered[::-1]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and warnings of lm-eval and of datasets."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def use_default_seeds() -> Iterator[None]:
    """Set lm-eval's default seeds, and restore the random state afterwards."""
    import numpy as np

    before = random.getstate(), np.random.get_state()
    random.seed(_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


_FILES: Final = ("arrow", "csv", "json", "pandas", "parquet", "text")


@dataclass(frozen=True, slots=True)
class TaskListing:
    """A task, group or tag of lm-eval."""

    name: str
    kind: str
    """Task, group or tag."""
    output: str
    """Its output type, such as generate_until; empty if unknown."""
    shots: int | None
    """Default number of solved examples."""
    needs: str
    """Requirements that are not installed with lm-eval."""


def list_tasks(pattern: str, place: str | None = None) -> list[TaskListing]:
    """Return the tasks, groups and tags whose names match a pattern.

    Args:
        pattern: A pattern such as "*mmlu*", or a word that names contain.
        place: A further folder of YAML files.

    Raises:
        InputError: lm-eval is not installed, or there is no such folder.
    """
    lm_eval_version()
    index = _index_with_folder(place)
    wanted = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    names = sorted(name for name in index if fnmatchcase(name.lower(), wanted.lower()))
    return [_make_listing(name, index[name]) for name in names]


def _make_listing(name: str, entry: Any) -> TaskListing:
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    if entry.kind is Kind.TAG:
        return TaskListing(name, "tag", "", None, f"its {len(entry.tags):,} tasks")
    try:
        config = load_yaml(entry.yaml_path, resolve_func=False)
    except Exception as error:
        return TaskListing(name, "task", "", None, f"cannot be read: {type(error).__name__}")
    if entry.kind is Kind.GROUP:
        members = config.get("task")
        num = len(members) if isinstance(members, list) else 0
        return TaskListing(name, "group", "", config.get("num_fewshot"), f"its {num:,} parts")
    output = "" if "class" in config else str(config.get("output_type", "generate_until"))
    needs = ", ".join(_needs(config))
    return TaskListing(name, "task", output, config.get("num_fewshot"), needs)


def _needs(config: Mapping[str, Any]) -> list[str]:
    needs = []
    path = config.get("dataset_path")
    if "class" in config:
        needs.append("what its class says")
    elif "custom_dataset" in config:
        needs.append("what its function makes")
    elif path is not None and path not in _FILES:
        needs.append(f"hub: {path}")
    if config.get("unsafe_code"):
        needs.append("runs programs, not here")
    if config.get("doc_to_image"):
        drawn = config.get("output_type", "generate_until") == "generate_until"
        needs.append("a model with --images" if drawn else "scores texts after images, not here")
    if config.get("doc_to_audio"):
        needs.append("sounds, not here")
    return needs
