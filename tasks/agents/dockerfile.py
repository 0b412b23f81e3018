"""Finds the files with which an episode of a Harbor task begins, if its Dockerfile only copies.

Copies follow the rules of Docker's builder: .dockerignore, wildcards, and directories as targets.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

from treegen.tasks.agents.harbor import COMPOSE, WORKDIR, HarborTask, is_name

_MAX_WILDCARDS: Final = 8
_MAX_STEPS: Final = 200
_NO_EFFECT: Final = ("FROM", "LABEL", "MAINTAINER", "CMD", "EXPOSE", "STOPSIGNAL")
"""Instructions that change no file and no command. Programs get the sandbox's Python."""
_ARCHIVES: Final = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
"""Files that ADD unpacks."""


def copied_files(task: HarborTask) -> tuple[dict[str, bytes], str]:
    """Return the files with which an episode begins, by path, and the working directory.

    Paths are relative to the working directory.

    Raises:
        DataError: The environment needs more than copies of files.
    """
    compose = next((name for name in COMPOSE if name in task.environment), None)
    if compose is not None:
        raise task.refuse(f"environment/{compose} starts more containers")
    if task.executables:  # copies have no modes
        raise task.refuse(
            f"the file {task.executables[0]:.60} is executable, but copied files lose this "
            "permission"
        )
    if "Dockerfile" not in task.environment:
        if task.image is not None:
            raise task.refuse(f"the task names the image {task.image} and has no Dockerfile")
        return dict(task.environment), WORKDIR
    copies, workdir = _run_steps(task)
    files = {}
    inside = workdir.rstrip("/") + "/"
    for path, data in copies.items():
        if not path.startswith(inside):
            raise task.refuse(
                f"its Dockerfile copies to {path}, which is outside the working directory {workdir}"
            )
        files[path.removeprefix(inside)] = data
    return files, workdir


def _run_steps(task: HarborTask) -> tuple[dict[str, bytes], str]:
    """Return the files that a Dockerfile copies, by absolute path, and the working directory."""
    workdir, workdirs = "/", {"/"}
    copies: dict[str, bytes] = {}
    context, num_stages = _context(task), 0
    for word, arguments in _instructions(task):
        num_stages += word == "FROM"
        step = f"{word} {arguments:.60}".rstrip()
        if not num_stages:
            raise task.refuse(f"its Dockerfile has the step {step} before FROM")
        if num_stages > 1:
            raise task.refuse("its Dockerfile has several stages")
        if word not in (*_NO_EFFECT, "WORKDIR", "COPY", "ADD"):
            raise task.refuse(f"its Dockerfile has the step {step}, which is not supported")
        if word not in _NO_EFFECT and "$" in arguments:
            raise task.refuse(f"its Dockerfile uses a variable in the step {step}")
        if word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, arguments.strip("\"'")))
            workdirs.update(_folders([f"{workdir}/."]))
        elif word not in _NO_EFFECT:
            folders = workdirs | _folders(copies)
            copies |= _copy(task, context, word, arguments, workdir, folders)
    if not num_stages:
        raise task.refuse("its Dockerfile has no FROM")
    if both := sorted(copies.keys() & (workdirs | _folders(copies))):
        raise task.refuse(f"its Dockerfile copies a file to {both[0]:.60}, which is a directory")
    return copies, workdir


def _folders(paths: Iterable[str]) -> set[str]:
    """Return all directories above some absolute paths."""
    return {"/" + above for path in paths for above in _prefixes(path[1:])[:-1]} | {"/"}


def _instructions(task: HarborTask) -> Iterator[tuple[str, str]]:
    text = task.environment["Dockerfile"].decode("utf-8", "replace")
    if "\0" in text:
        raise task.refuse("its Dockerfile contains NUL characters")
    if re.match(r"(\s*#.*\n)*\s*#\s*(?i:escape)\s*=", text):
        raise task.refuse("its Dockerfile changes the escape character")
    lines = [line.strip() for line in text.split("\n") if not line.lstrip().startswith("#")]
    lines = re.sub(r"(?<!\\)\\[ \t]*\n", " ", "\n".join(lines)).split("\n")
    steps = [line.strip() for line in lines if line.strip()]
    if len(steps) > _MAX_STEPS:
        raise task.refuse(f"its Dockerfile has more than {_MAX_STEPS} steps")
    for step in steps:
        word, *arguments = step.split(maxsplit=1)
        yield word.upper(), arguments[0] if arguments else ""


def _context(task: HarborTask) -> dict[str, bytes]:
    """Return the files that COPY may see: all that .dockerignore does not exclude."""
    ignored = task.environment.get("Dockerfile.dockerignore")  # it wins over the other one
    if ignored is None:
        ignored = task.environment.get(".dockerignore", b"")
    rules = []
    for line in ignored.decode("utf-8", "replace").split("\n"):
        line = line.strip()
        is_exception = line.startswith("!")
        pattern = posixpath.normpath("/" + line.removeprefix("!").strip()).lstrip("/")
        if line and not line.startswith("#") and pattern:
            rules.append((_glob(task, pattern), is_exception))
    files = {}
    for path, data in task.environment.items():
        is_kept = path not in ("Dockerfile", "Dockerfile.dockerignore", ".dockerignore")
        for pattern_of, is_exception in rules:  # the last one that matches decides
            if any(pattern_of.fullmatch(prefix) for prefix in _prefixes(path)):
                is_kept = is_exception
        if is_kept:
            files[path] = data
    return files


def _glob(task: HarborTask, pattern: str) -> re.Pattern[str]:
    """Return a pattern of Docker: * and ? stay within a name, ** does not."""
    if re.search(r"[\[\]\\]", pattern):
        raise task.refuse(f"the pattern {pattern!r:.60} contains brackets or escapes")
    if len(re.findall(r"[*?]", pattern)) > _MAX_WILDCARDS or pattern.count("**") > 2:
        raise task.refuse(f"the pattern {pattern!r:.60} has too many wildcards")
    # An earlier * of a name ends at the first match of the text after it: no search goes back.
    parts = re.split(r"(\*\*/|\*\*|\*(?=[^*/]+\*)[^*/]+|\*|\?)", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    for part in parts:
        if part.startswith("*") and part not in special:
            special[part] = f"(?>[^/]*?{re.escape(part[1:])})".replace(r"\?", "[^/]")
    return re.compile("".join(special.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _prefixes(path: str) -> list[str]:
    """Return the directories above a path, the highest first, and the path itself."""
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(1, len(names) + 1)]


def _copy(
    task: HarborTask,
    context: Mapping[str, bytes],
    word: str,
    arguments: str,
    workdir: str,
    folders: Set[str],
) -> dict[str, bytes]:
    """Return the files of a COPY by their absolute paths.

    Args:
        task: The task.
        context: The files that can be copied.
        word: COPY or ADD.
        arguments: The words after it.
        workdir: The working directory.
        folders: The directories that exist.
    """
    unclear = f"its Dockerfile has a step that could not be parsed: {word} {arguments:.60}"
    try:
        words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    except (ValueError, RecursionError):
        raise task.refuse(unclear) from None
    if not all(isinstance(argument, str) and argument and is_name(argument) for argument in words):
        raise task.refuse(unclear)
    flags = [argument for argument in words if argument.startswith("--")]
    *sources, target = [argument for argument in words if not argument.startswith("--")] or [""]
    is_remote = any("://" in source or source.startswith("git@") for source in sources)
    unpacks = word == "ADD" and any(source.endswith(_ARCHIVES) for source in sources)
    if flags or is_remote or unpacks or not sources:
        raise task.refuse(
            f"its Dockerfile has the step {word} {arguments:.60}, which is not supported"
        )
    into_folder = target.endswith("/") or len(sources) > 1
    target = posixpath.normpath(posixpath.join(workdir, target))
    into_folder = into_folder or target in folders
    copied: dict[str, bytes] = {}
    for source in sources:
        source = posixpath.normpath(source.lstrip("/") or ".")
        if source.startswith(".."):
            raise task.refuse(f"its Dockerfile copies {source}, which is outside environment/")
        pattern = _glob(task, source)
        names, matches = {}, set()
        for path in context:
            above = next((prefix for prefix in _prefixes(path) if pattern.fullmatch(prefix)), None)
            matches.add(above)
            if source == ".":
                names[path] = path
            elif above == path:  # the target names the copy itself, unless it is a directory
                names[path] = posixpath.basename(path) if into_folder else ""
            elif above is not None:  # a directory, whose content is copied
                names[path] = path.removeprefix(f"{above}/")
        if not names:
            raise task.refuse(f"its Dockerfile copies {source}, which is not in environment/")
        if "" in names.values() and len(matches - {None}) > 1:
            raise task.refuse(
                f"its Dockerfile copies several files ({source}) to {target:.60}, but the target "
                "is not a directory and does not end with a slash"
            )
        for path, name in names.items():
            copied[posixpath.join(target, name) if name else target] = context[path]
    return copied
