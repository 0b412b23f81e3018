"""Finds the tasks, groups and tags in folders of lm-eval's YAML files, in about a second.

lm-eval parses all of its 14,000 files for this, which takes half a minute. Here only the five keys
that name things are parsed. The result is the same as lm-eval's own index.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from treegen.common.files import read_text

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


def index_with(place: Path) -> dict[str, Any]:
    """Return the index entries of lm-eval's own tasks and of a folder, or of a file's folder.

    The folder's entries override lm-eval's. Subfolders of a file's folder are not searched.
    """
    files = _files(place) if place.is_dir() else sorted(place.parent.glob("*.yaml"))
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
    """Return the keys of one YAML file that name things, with their values."""
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    text = read_text(path)
    if not _ANY_KEY.search(text):  # JSON, or indented keys
        whole = load_yaml(path, resolve_func=False, recursive=False)
        return {name: whole[name] for name in _KEYS if name in whole}
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
