"""Reads task folders of Harbor, and finds those whose environment can be built by copying files.

A folder (https://www.harborframework.com/docs/tasks) has task.toml, instruction.md, environment/
with a Dockerfile, tests/ with test.sh, and perhaps solution/, which is never read:

    hello/task.toml
    hello/instruction.md
    hello/environment/Dockerfile
    hello/tests/test.sh
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treegen.common.files import describe_read_error, open_regular
from treegen.errors import DataError, arg
from treegen.evals.problem import Problem, Skipped

_MAX_BYTES: Final = 16 << 20
_MAX_FILES: Final = 1000
_MAX_WILDCARDS: Final = 8
_MAX_STEPS: Final = 200
_MAX_LINE: Final = 1000
_WORKDIR: Final = "/app"
"""The directory of files without a Dockerfile."""
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_NO_EFFECT: Final = ("FROM", "LABEL", "MAINTAINER", "CMD", "EXPOSE", "STOPSIGNAL")
"""Instructions that change no file and no command. Programs get the sandbox's Python."""
_SECONDS: Final = 600.0
_SHELL_SETUP: Final = re.compile(
    r"set([ \t]+[-+]([eux]+|[eux]*o[ \t]+pipefail))+|mkdir[ \t]+-p[ \t]+/logs/verifier/?"
)
_SHELL_REWARD: Final = re.compile(
    r"(if \[ \$\? -eq 0 \]; ?then echo 1(\.0)? ?> ?/logs/verifier/reward\.txt "
    r"else echo 0(\.0)? ?> ?/logs/verifier/reward\.txt fi)?( ?exit [\w$?]+)?"
)
"""What may follow the test: the reward is its exit status."""
_SHELL_TEST: Final = re.compile(r"python3? /tests/([\w./-]+\.py)")
_ARCHIVES: Final = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
"""Files that ADD unpacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task folder."""

    folder: Path
    """The folder."""
    instruction: str
    """What the agent is asked for."""
    environment: Mapping[str, bytes]
    """The files of environment/, by path."""
    tests: Mapping[str, bytes]
    """The files of tests/, by path. The agent must never see them."""
    image: str | None
    """A prebuilt image; None if there is none."""
    agent_seconds: float
    """The time of an episode."""
    verifier_seconds: float
    """The time of the tests."""
    metadata: Mapping[str, Any]
    """The table [metadata] of task.toml."""
    executables: tuple[str, ...] = ()
    """The files of environment/ and tests/ that can be executed, except tests/test.sh."""
    backend: str = "local"
    """The environment that is to build it, for messages."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    def refuse(self, reason: str) -> DataError:
        """Return the error for a task that the environment cannot build."""
        return DataError(
            f"the environment {self.backend} cannot build Harbor's task {self.name}: {reason}; "
            f"choose another {arg('environment=')}, such as one with containers, or leave the "
            "task out"
        )


def read_folder(path: Path) -> tuple[list[HarborTask], list[Skipped]]:
    """Read the task of a folder, or those of the folders in it, in the order of their names.

    Args:
        path: A task folder, or a folder of such folders.

    Returns:
        The tasks, and the folders that are no readable tasks.

    Raises:
        DataError: There is no task.
    """
    if (path / "task.toml").is_file():
        folders = [path]
    else:
        try:
            folders = sorted(below.parent for below in path.glob("*/task.toml"))
        except OSError as error:
            raise DataError(describe_read_error(path, error)) from None
    tasks, skipped = [], []
    for folder in folders:
        try:
            tasks.append(read_task(folder))
        except DataError as error:
            skipped.append(Skipped(str(folder / "task.toml"), 1, str(error)))
    if not tasks:
        reason = f"; {skipped[0].reason}" if skipped else "; a task has a file task.toml"
        raise DataError(f"{path} has no readable task folder of Harbor{reason}")
    return tasks, skipped


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Symbolic links are refused, because they may lead out of it.

    Raises:
        DataError: A file is missing, is no regular file, or has another form.
    """
    if folder.is_symlink():
        raise DataError(f"{folder} is a symbolic link; name the folder itself")
    config = _read_config(folder)
    instruction = _text(folder, "instruction.md")
    if config.get("steps"):
        raise DataError(
            f"{folder.name} has several steps, which treegen does not run; leave it out"
        )
    environment, agent, verifier = (
        _table(folder, config, name) for name in ("environment", "agent", "verifier")
    )
    image = environment.get("docker_image")
    if not isinstance(image, str | None):
        raise DataError(f"docker_image in {folder / 'task.toml'} is not text; write it in quotes")
    places = {name: _files(folder / name) for name in ("environment", "tests")}
    names = [f"{place}/{name}" for place, files in places.items() for name in files]
    return HarborTask(
        folder=folder,
        instruction=instruction.strip(),
        environment=places["environment"],
        tests=places["tests"],
        image=image,
        agent_seconds=_seconds(folder, agent),
        verifier_seconds=_seconds(folder, verifier),
        metadata=_table(folder, config, "metadata"),
        executables=tuple(
            name for name in names if name != "tests/test.sh" and os.access(folder / name, os.X_OK)
        ),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    text = _text(folder, "task.toml")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number can have too many digits
        raise DataError(f"{folder / 'task.toml'} is not TOML: {error}; fix the file") from None


def _table(folder: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, Mapping):
        raise DataError(f"{name} in {folder / 'task.toml'} is not a table; write [{name}]")
    return table


def _seconds(folder: Path, table: Mapping[str, Any]) -> float:
    seconds = table.get("timeout_sec", _SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise DataError(
            f"timeout_sec in {folder / 'task.toml'} must be seconds, more than 0 and less than "
            "1,000,000"
        )
    return float(seconds)


def _text(folder: Path, name: str) -> str:
    try:
        return _read(folder / name).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{folder / name} is not UTF-8; save it as UTF-8") from None


def _read(path: Path) -> bytes:
    """Return the content of a regular file; links are not followed."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES:,} bytes; leave the task out")
    return data


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files of a directory by their paths below it; a missing one has none."""
    try:
        return dict(_walk(folder))
    except OSError as error:  # such as a path that is too long
        raise DataError(describe_read_error(folder, error)) from None


def _walk(folder: Path) -> Iterator[tuple[str, bytes]]:
    size = num = 0
    if folder.is_symlink():
        raise DataError(f"{folder} is a symbolic link, which may lead out of the task; copy it")

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        for name in sorted([*names, *(each for each in folders if Path(place, each).is_symlink())]):
            path = Path(place, name)
            if path.is_symlink():
                raise DataError(
                    f"{path} is a symbolic link, which may lead out of the task; copy the file"
                )
            data = _read(path)
            size, num = size + len(data), num + 1
            if size > _MAX_BYTES or num > _MAX_FILES:
                raise DataError(
                    f"{folder} has more than {_MAX_FILES:,} files or {_MAX_BYTES:,} bytes; "
                    "leave the task out"
                )
            yield path.relative_to(folder).as_posix(), data


# What can be built by copying


def copied_files(task: HarborTask) -> tuple[dict[str, bytes], str]:
    """Return the files with which an episode begins, by path, and the working directory.

    Paths are relative to the working directory.

    Raises:
        DataError: The environment needs more than copies of files.
    """
    compose = next((name for name in _COMPOSE if name in task.environment), None)
    if compose is not None:
        raise task.refuse(f"environment/{compose} starts containers")
    if task.executables:  # copies have no modes
        raise task.refuse(f"the file {task.executables[0]:.60} is executable")
    if "Dockerfile" not in task.environment:
        if task.image is not None:
            raise task.refuse(f"it starts from the image {task.image}")
        return dict(task.environment), _WORKDIR
    workdir = "/"
    copies: dict[str, bytes] = {}
    context, num_stages = _context(task), 0
    for word, rest in _instructions(task):
        num_stages += word == "FROM"
        step = f"{word} {rest:.60}".rstrip()
        if num_stages > 1:
            raise task.refuse("its Dockerfile has several stages")
        if word not in (*_NO_EFFECT, "WORKDIR", "COPY", "ADD"):
            raise task.refuse(f"its Dockerfile has the step {step}")
        if word not in _NO_EFFECT and "$" in rest:
            raise task.refuse(f"its Dockerfile has a variable in the step {step}")
        if word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip("\"'")))
        elif word not in _NO_EFFECT:
            copies |= _copy(task, context, word, rest, workdir)
    files = {}
    inside = workdir.rstrip("/") + "/"
    for path, data in copies.items():
        if not path.startswith(inside):
            raise task.refuse(f"its Dockerfile copies to {path}, outside of {workdir}")
        files[path.removeprefix(inside)] = data
    return files, workdir


def _instructions(task: HarborTask) -> Iterator[tuple[str, str]]:
    text = task.environment["Dockerfile"].decode("utf-8", "replace")
    if re.match(r"(\s*#.*\n)*\s*#\s*(?i:escape)\s*=", text):
        raise task.refuse("its Dockerfile changes the escape character")
    lines = [line.strip() for line in text.split("\n") if not line.lstrip().startswith("#")]
    lines = re.sub(r"(?<!\\)\\[ \t]*\n", " ", "\n".join(lines)).split("\n")
    steps = [line.strip() for line in lines if line.strip()]
    if len(steps) > _MAX_STEPS:
        raise task.refuse(f"its Dockerfile has more than {_MAX_STEPS} steps")
    for step in steps:
        word, *rest = step.split(maxsplit=1)
        yield word.upper(), rest[0] if rest else ""


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
    kept = {}
    for path, data in task.environment.items():
        is_kept = path not in ("Dockerfile", "Dockerfile.dockerignore", ".dockerignore")
        for pattern_of, is_exception in rules:  # the last one that matches decides
            if any(pattern_of.fullmatch(prefix) for prefix in _prefixes(path)):
                is_kept = is_exception
        if is_kept:
            kept[path] = data
    return kept


def _glob(task: HarborTask, pattern: str) -> re.Pattern[str]:
    """Return a pattern of Docker: * and ? stay within a name, ** does not."""
    if re.search(r"[\[\]\\]", pattern):
        raise task.refuse(f"the pattern {pattern!r:.60} has brackets or escapes")
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
    task: HarborTask, context: Mapping[str, bytes], word: str, rest: str, workdir: str
) -> dict[str, bytes]:
    """Return the files of a COPY by their absolute paths.

    Args:
        task: The task.
        context: The files that can be copied.
        word: COPY or ADD.
        rest: The words after it.
        workdir: The working directory.
    """
    unclear = f"its Dockerfile has the step {word} {rest:.60}, which is unclear"
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except (ValueError, RecursionError):
        raise task.refuse(unclear) from None
    if not all(isinstance(each, str) and each for each in words):
        raise task.refuse(unclear)
    flags = [each for each in words if each.startswith("--")]
    *sources, target = [each for each in words if not each.startswith("--")] or [""]
    is_remote = any("://" in source or source.startswith("git@") for source in sources)
    unpacks = word == "ADD" and any(source.endswith(_ARCHIVES) for source in sources)
    if flags or is_remote or unpacks or not sources:
        raise task.refuse(f"its Dockerfile has the step {word} {rest:.60}")
    into_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
    target = posixpath.normpath(posixpath.join(workdir, target))
    copied: dict[str, bytes] = {}
    for source in sources:
        source = posixpath.normpath(source.lstrip("/") or ".")
        if source.startswith(".."):
            raise task.refuse(f"its Dockerfile copies {source}, outside of environment/")
        pattern = _glob(task, source)
        names = {}
        for path in context:
            above = next((each for each in _prefixes(path) if pattern.fullmatch(each)), None)
            if source == ".":
                names[path] = path
            elif above == path:  # the target names the copy itself, unless it is a directory
                is_named = not into_folder and path == source
                names[path] = "" if is_named else posixpath.basename(path)
            elif above is not None:  # a directory, whose content is copied
                names[path] = path.removeprefix(f"{above}/")
        if not names:
            raise task.refuse(f"its Dockerfile copies {source}, which environment/ does not have")
        for path, name in names.items():
            copied[posixpath.join(target, name) if name else target] = context[path]
    return copied


def check_image(task: HarborTask) -> None:
    """Raise DataError unless docker can build the environment of a task from a Dockerfile."""
    if any(name in task.environment for name in _COMPOSE):
        raise task.refuse("it starts several containers")
    if "Dockerfile" not in task.environment:
        raise task.refuse("it has no Dockerfile")
    if "test.sh" not in task.tests:
        raise task.refuse("tests/test.sh is missing")


def python_test(task: HarborTask, workdir: str = _WORKDIR) -> str:
    """Return the path in tests/ of the Python program whose exit status is the whole reward.

    Args:
        task: The task.
        workdir: The working directory, in which test.sh starts.

    Raises:
        DataError: test.sh does more than running one Python program.
    """
    script = task.tests.get("test.sh")
    if script is None:
        raise task.refuse("tests/test.sh is missing")
    programs: list[str] = []
    rest = []
    for line in script.decode("utf-8", "replace").split("\n"):
        if len(line) > _MAX_LINE:
            raise task.refuse(f"tests/test.sh has lines of more than {_MAX_LINE:,} characters")
        line = line.strip(" \t")
        setup = line.rstrip("/") == f"cd {workdir}".rstrip("/") or _SHELL_SETUP.fullmatch(line)
        if not line or line.startswith("#") or (not programs and setup):
            continue
        if match := _SHELL_TEST.fullmatch(line):
            programs.append(match[1])
        elif programs:
            rest.append(line)
        else:
            raise task.refuse(f"tests/test.sh has the command {line:.60}")
    if len(programs) != 1 or programs[0] not in task.tests:
        raise task.refuse("tests/test.sh does not run one Python program of tests/")
    if not _SHELL_REWARD.fullmatch(" ".join(rest)):
        raise task.refuse(f"tests/test.sh has the command {rest[0]:.60}")
    return programs[0]


def as_problem(task: HarborTask) -> Problem:
    """Return a task as a problem. Its tests are only part of a hash."""
    digest = hashlib.sha256()
    for place in (task.environment, task.tests):
        for path, data in sorted(place.items()):
            digest.update(json.dumps([path, len(data)]).encode() + data)
    plain = {
        name: value
        for name, value in task.metadata.items()
        if isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 63)
    }
    return Problem(task.name, task.instruction, digest.hexdigest(), plain)
