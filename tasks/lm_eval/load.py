"""Lists lm-eval's tasks, and loads them quietly, with its seeds and with helpful errors.

lm-eval parses all of its 14,000 YAML files to find the names of tasks, groups and tags, which takes
half a minute. Here only the five keys that name things are parsed, which takes about a second. The
result is the same as lm-eval's own index.
"""

import io
import logging
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Final

from treegen.common.files import describe_read_error, read_text
from treegen.common.spelling import did_you_mean
from treegen.common.yaml_texts import MAX_YAML_BYTES, check_yaml
from treegen.errors import DataError, InputError, arg, install
from treegen.evals.registry import LM_EVAL

_KEYS: Final = ("task", "group", "class", "tag", "include")
_TOP: Final = re.compile(
    rf"^([\"']?)({'|'.join(_KEYS)})\1:(.*(?:\n(?:[ \t-].*|#.*|[ \t]*)$)*)", re.MULTILINE
)
_ANY_KEY: Final = re.compile(r"^[\"']?[A-Za-z_]\w*[\"']?:", re.MULTILINE)
_PLAIN: Final = re.compile(r"\s*([\"']?)([A-Za-z_][\w.\-/]*)\1\s*\Z")
_LISTED: Final = re.compile(r"\s*(#.*)?\n\s*-")
_WORDS: Final = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
_IGNORED: Final = frozenset(("__pycache__", ".ipynb_checkpoints"))


@cache
def own_folder() -> Path:
    """Return the folder of lm-eval's own tasks."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


@cache
def own_index() -> Mapping[str, Any]:
    """Return lm-eval's index entries of its own tasks, by name."""
    return index_of(_files(own_folder()))


def index_with(folder: Path) -> dict[str, Any]:
    """Return the index entries of lm-eval's own tasks and of a folder, or of a file's folder.

    The folder's entries override lm-eval's. Subfolders of a file's folder are not searched.
    """
    files = _files(folder) if folder.is_dir() else sorted(folder.parent.glob("*.yaml"))
    return {**own_index(), **index_of(files)}


def index_of(files: Iterable[Path]) -> dict[str, Any]:
    """Return lm-eval's index entries of YAML files, by name, leaving out files without a name."""
    from lm_eval.tasks._index import Kind, TaskIndex

    entries: dict[str, Any] = {}
    read = _Reader()
    for path in files:
        try:
            keys = read(path)
        except Exception:  # lm-eval also leaves out unreadable files
            continue
        if Kind.UNKNOWN is (kind := _kind(keys, Kind)):
            continue
        name = keys["group"] if kind is Kind.GROUP else keys.get("task")
        if isinstance(name, str) and name not in entries:
            TaskIndex.process_cfg(dict(keys), path, entries)
    return entries


def _kind(keys: Mapping[str, Any], kind: Any) -> Any:
    for name, of in (("class", kind.PY_TASK), ("group", kind.GROUP), ("task", kind.TASK)):
        if name in keys:
            return of
    return kind.UNKNOWN


class _Reader:
    """Reads the keys that name things, including those of included files; reads each file once."""

    def __init__(self) -> None:
        self._cache: dict[Path, dict[str, Any]] = {}

    def __call__(self, path: Path) -> dict[str, Any]:
        if path not in self._cache:
            self._cache[path] = {}  # ends the recursion if files include each other
            self._cache[path] = self._read(path)
        return self._cache[path]

    def _read(self, path: Path) -> dict[str, Any]:
        keys = keys_of(path)
        included = keys.pop("include", [])
        inherited: dict[str, Any] = {}
        for name in included if isinstance(included, list) else [included]:
            inherited |= self(Path(os.path.normpath(path.parent / str(name))))
        return inherited | keys


def keys_of(path: Path) -> dict[str, Any]:
    """Return the keys of one YAML file that name things, with their values.

    Raises:
        InputError: The file is not one of lm-eval's own, and is not valid YAML or exceeds a limit.
        OSError: The file cannot be read.
    """
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    text = read_text(path, MAX_YAML_BYTES)
    if not path.is_relative_to(own_folder()):
        try:
            check_yaml(text)
        except (ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:500]
            raise InputError(f"{path} is not valid YAML: {reason}; fix the file") from None
    if not _ANY_KEY.search(text):  # JSON, or indented keys
        config = load_yaml(path, resolve_func=False, recursive=False)
        return {name: config[name] for name in _KEYS if name in config}
    keys: dict[str, Any] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for _, name, value in _TOP.findall(text):
        plain = _PLAIN.match(value)
        if plain and (plain[1] or plain[2].lower() not in _WORDS):
            keys[name] = plain[2]
        elif name == "class":
            keys[name] = value.strip()
        elif name == "task" and _LISTED.match(value):
            keys[name] = []  # the members of a group are not needed
        else:
            keys[name] = yaml.load(f"{name}:{value}", Loader=loader)[name]
    return keys


def _files(folder: Path) -> list[Path]:
    """Return a folder's YAML files in lm-eval's order."""
    paths = (path for path in folder.glob("**/*.yaml") if _IGNORED.isdisjoint(path.parts))
    return sorted(paths, key=lambda path: path.as_posix())


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
            f"lm-eval tasks need the package lm-eval; install it with: {install('lm-eval')}"
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
    task_name, index = _entry(name)
    from lm_eval.evaluator_utils import _collect_groups_bottom_up
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    manager._index = index
    with quiet(), use_default_seeds(), _no_metric_of_this_folder():
        try:
            loaded = manager.load(task_name)
        except InputError:
            raise
        except Exception as error:
            raise _failure(error, task_name) from error
    leaves = dict(loaded["tasks"])
    for leaf, task in leaves.items():
        _check(leaf, task)
    groups = _collect_groups_bottom_up({group.name: group for group in loaded["groups"].values()})
    return LoadedTasks(task_name, leaves, tuple(reversed(groups)))


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    """Return the requested task's name in the index, and the index."""
    if not name.startswith(LM_EVAL):
        path = Path(name)
        if not path.is_file():
            raise InputError(describe_read_error(path, FileNotFoundError()))
        path = path.absolute()
        try:
            _Reader()(path)  # index_of leaves out a file that cannot be read
        except OSError as error:  # of the file or one that it includes
            raise InputError(describe_read_error(error.filename or path, error)) from None
        entry = next((e for e in index_of([path]).values() if e.yaml_path == path), None)
        if entry is None:
            raise InputError(
                f"{path} is not an lm-eval task; add a line such as `task: my_task`, or "
                "`group:` above a list of tasks"
            )
        index = index_with(path)
        _check_safe(entry.name, entry)
        return entry.name, {**index, entry.name: entry}
    task_name, at, folder = name.removeprefix(LM_EVAL).partition("@")
    index = _index_with_folder(folder if at else None)
    if task_name not in index:
        lists = "; use `treegen tasks --lm-eval PATTERN` to list the tasks"
        hint = did_you_mean(task_name, index) or lists
        raise InputError(f"lm-eval has no task {task_name!r}{hint}")
    _check_safe(task_name, index[task_name])
    return task_name, index


def _index_with_folder(folder: str | None) -> dict[str, Any]:
    """Return the index of lm-eval's own tasks, and of the tasks in a folder if it is not None."""
    if folder is None:
        return dict(own_index())
    if not (folder and Path(folder).is_dir()):  # Path("") would be the working directory
        raise InputError(
            f"{folder!r} is not a folder; set {arg('include_path=')} to a folder that contains "
            "YAML files of tasks"
        )
    return index_with(Path(folder))


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
            f"the task uses the hub metric {name}, but lm-eval would run {program} from "
            "the working directory instead; use another working directory, or rename the file"
        )


def _unsafe(name: str) -> InputError:
    return InputError(
        f"the lm-eval task {name} runs programs from the model without a sandbox; use the "
        "treegen tasks humaneval, mbpp, apps or livecodebench, which use a sandbox"
    )


def _check(name: str, task: Any) -> None:
    """Raise InputError for a task that cannot be run here."""
    if getattr(task, "UNSAFE_CODE", False):
        raise _unsafe(name)
    if task.get_config("doc_to_audio"):
        raise InputError(f"the lm-eval task {name} uses audio, which is not supported")
    if getattr(task, "MULTIMODAL", False) and task.OUTPUT_TYPE != "generate_until":
        raise InputError(
            f"the lm-eval task {name} scores given texts after images, which is not supported; "
            "use a task with the output type generate_until"
        )


def _failure(error: Exception, name: str) -> InputError | DataError:
    if isinstance(error, ImportError):
        missing = f"; install {error.name}" if error.name else ""
        return InputError(f"lm-eval task {name} needs a package: {format_error(error)}{missing}")
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
            f"the data of the lm-eval task {name} are not on this machine: {reason}; run the task "
            "once with access to the Hugging Face Hub, or use your own data in a YAML file with "
            "dataset_path: json"
        )
    return InputError(f"the lm-eval task {name} could not be created: {reason}")


def format_error(error: BaseException) -> str:
    """Return the type and message of an error on one line, at most 600 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


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
    """Default number of few-shot examples."""
    needs: str
    """Requirements that are not installed with lm-eval."""


def list_tasks(pattern: str, folder: str | None = None) -> list[TaskListing]:
    """Return the tasks, groups and tags whose names match a pattern.

    Args:
        pattern: A pattern such as "*mmlu*", or a word that names contain.
        folder: A further folder of YAML files.

    Raises:
        InputError: lm-eval is not installed, or there is no such folder.
    """
    lm_eval_version()
    index = _index_with_folder(folder)
    name_pattern = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    names = sorted(name for name in index if fnmatchcase(name.lower(), name_pattern.lower()))
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
        needs.append("runs programs: not supported")
    if config.get("doc_to_image"):
        generates = config.get("output_type", "generate_until") == "generate_until"
        needs.append(
            "a model with --images" if generates else "scores texts after images: not supported"
        )
    if config.get("doc_to_audio"):
        needs.append("audio: not supported")
    return needs
