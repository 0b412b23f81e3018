"""Reads task folders of Harbor.

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
import re
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
_MAX_LINE: Final = 1000
WORKDIR: Final = "/app"
"""The directory of files without a Dockerfile."""
COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
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
            f"the environment {self.backend} cannot build the Harbor task {self.name}: {reason}; "
            f"use another {arg('environment=')}, such as one with containers, or remove the task"
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
        remedy = "check that each task folder contains a file task.toml"
        reason = f"; {skipped[0].reason if skipped else remedy}"
        raise DataError(f"no readable Harbor task was found in {path}{reason}")
    return tasks, skipped


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Symbolic links are refused, because they may lead out of it.

    Raises:
        DataError: A file is missing, is no regular file, or has another form.
    """
    if folder.is_symlink():
        raise DataError(f"{folder} is a symbolic link; pass the path of the folder itself")
    _check_name(folder)
    config = _read_config(folder)
    instruction = _text(folder, "instruction.md")
    if config.get("steps"):
        raise DataError(
            f"the Harbor task {folder.name} has several steps, which is not supported; remove the "
            "task"
        )
    environment, agent, verifier = (
        _table(folder, config, name) for name in ("environment", "agent", "verifier")
    )
    image = environment.get("docker_image")
    if not isinstance(image, str | None):
        raise DataError(
            f"docker_image in {folder / 'task.toml'} must be a string; put the value in quotes"
        )
    files_of = {name: _files(folder / name) for name in ("environment", "tests")}
    names = [f"{part}/{name}" for part, files in files_of.items() for name in files]
    return HarborTask(
        folder=folder,
        instruction=instruction.strip(),
        environment=files_of["environment"],
        tests=files_of["tests"],
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
        raise DataError(
            f"{folder / 'task.toml'} could not be read as TOML: {error}; fix the file"
        ) from None


def _table(folder: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, Mapping):
        raise DataError(f"{name} in {folder / 'task.toml'} must be a table; write [{name}]")
    return table


def _seconds(folder: Path, table: Mapping[str, Any]) -> float:
    seconds = table.get("timeout_sec", _SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise DataError(
            f"timeout_sec in {folder / 'task.toml'} must be a number of seconds above 0 and "
            "below 1,000,000"
        )
    return float(seconds)


def is_name(text: str) -> bool:
    """Return whether a text can be part of a path: it is UTF-8 and has no NUL character."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _check_name(path: Path) -> None:
    if not is_name(path.name):
        raise DataError(
            f"the name {path.name!r:.80} in {path.parent} is not UTF-8; rename the file or folder"
        )


def _text(folder: Path, name: str) -> str:
    try:
        return _read(folder / name).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{folder / name} is not UTF-8; save the file as UTF-8") from None


def _read(path: Path) -> bytes:
    """Return the content of a regular file; links are not followed."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES:,} bytes; remove the task")
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
        raise DataError(
            f"{folder} is a symbolic link, which may point outside the task; replace the link "
            "with a copy of the folder"
        )

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        for name in sorted(
            [*names, *(link for link in folders if Path(parent, link).is_symlink())]
        ):
            path = Path(parent, name)
            _check_name(path)
            if path.is_symlink():
                raise DataError(
                    f"{path} is a symbolic link, which may point outside the task; replace the "
                    "link with a copy of the file"
                )
            data = _read(path)
            size, num = size + len(data), num + 1
            if size > _MAX_BYTES or num > _MAX_FILES:
                raise DataError(
                    f"{folder} has more than {_MAX_FILES:,} files or {_MAX_BYTES:,} bytes; "
                    "remove the task"
                )
            yield path.relative_to(folder).as_posix(), data


def check_image(task: HarborTask) -> None:
    """Raise DataError unless docker can build the environment of a task from a Dockerfile."""
    if any(name in task.environment for name in COMPOSE):
        raise task.refuse("the task starts several containers")
    if "Dockerfile" not in task.environment:
        raise task.refuse("the task has no Dockerfile")
    if not re.search(rb"(?mi)^[ \t]*FROM[ \t]", task.environment["Dockerfile"]):
        raise task.refuse("its Dockerfile has no FROM")
    if "test.sh" not in task.tests:
        raise task.refuse("tests/test.sh is missing")


def python_test(task: HarborTask, workdir: str = WORKDIR) -> str:
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
    reward_lines = []
    for line in script.decode("utf-8", "replace").split("\n"):
        if len(line) > _MAX_LINE:
            raise task.refuse(f"tests/test.sh has a line longer than {_MAX_LINE:,} characters")
        line = line.strip(" \t")
        setup = line.rstrip("/") == f"cd {workdir}".rstrip("/") or _SHELL_SETUP.fullmatch(line)
        if not line or line.startswith("#") or (not programs and setup):
            continue
        if match := _SHELL_TEST.fullmatch(line):
            programs.append(match[1])
        elif programs:
            reward_lines.append(line)
        else:
            raise task.refuse(f"tests/test.sh has an unsupported command: {line:.60}")
    if len(programs) != 1 or programs[0] not in task.tests:
        raise task.refuse("tests/test.sh must run exactly one Python program from tests/")
    if not _SHELL_REWARD.fullmatch(" ".join(reward_lines)):
        raise task.refuse(f"tests/test.sh has an unsupported command: {reward_lines[0]:.60}")
    return programs[0]


def as_problem(task: HarborTask) -> Problem:
    """Return a task as a problem. Its tests are only part of a hash."""
    digest = hashlib.sha256()
    for part in (task.environment, task.tests):
        for path, data in sorted(part.items()):
            digest.update(json.dumps([path, len(data)]).encode() + data)
    plain = {
        name: value
        for name, value in task.metadata.items()
        if isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 63)
    }
    return Problem(task.name, task.instruction, digest.hexdigest(), plain)
