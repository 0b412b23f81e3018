"""Lists lm-eval's tasks, groups and tags by name, and what each needs, without loading them."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from treegen.errors import InputError, arg
from treegen.tasks.lm_eval.index import index_with, own_index
from treegen.tasks.lm_eval.load import lm_eval_version

_FILES: Final = ("arrow", "csv", "json", "pandas", "parquet", "text")


@dataclass(frozen=True, slots=True)
class TaskListing:
    """A task, group or tag of lm-eval.

    kind: task, group or tag.
    output: its output type, such as generate_until; empty if unknown.
    shots: default number of solved examples.
    needs: requirements that are not installed with lm-eval.
    """

    name: str
    kind: str
    output: str
    shots: int | None
    needs: str


def list_tasks(pattern: str, place: str | None = None) -> list[TaskListing]:
    """Return the tasks, groups and tags whose names match a pattern.

    Args:
        pattern: A pattern such as "*mmlu*", or a word that names contain.
        place: A further folder of YAML files.

    Raises:
        InputError: lm-eval is not installed, or there is no such folder.
    """
    lm_eval_version()
    if place is not None and not Path(place).is_dir():
        raise InputError(
            f"{place!r} is no folder; give {arg('include_path=')} one with YAML files of tasks"
        )
    index = own_index() if place is None else index_with(Path(place))
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
    return TaskListing(
        name, "task", _output(config), config.get("num_fewshot"), ", ".join(_needs(config))
    )


def _output(config: Mapping[str, Any]) -> str:
    return "" if "class" in config else str(config.get("output_type", "generate_until"))


def _needs(config: Mapping[str, Any]) -> list[str]:
    found = []
    path = config.get("dataset_path")
    if "class" in config:
        found.append("what its class says")
    elif "custom_dataset" in config:
        found.append("what its function makes")
    elif path is not None and path not in _FILES:
        found.append(f"hub: {path}")
    if config.get("unsafe_code"):
        found.append("runs programs, not here")
    if config.get("doc_to_image"):
        drawn = config.get("output_type", "generate_until") == "generate_until"
        found.append("a model with --images" if drawn else "scores texts after images, not here")
    if config.get("doc_to_audio"):
        found.append("sounds, not here")
    return found
