"""Worlds in sandboxes of Inspect: docker, local, and every other provider that is installed.

A snapshot is an archive of the working directory. With docker, it is an image of the container.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from treegen.common.files import (
    MAX_DATA_BYTES,
    create_locked,
    describe_read_error,
    open_regular,
    read_bytes,
    replace_file,
    sweep,
)
from treegen.errors import CapacityError, InputError, StoppedError, WorldError, arg
from treegen.integrations.inspect_ai.docker_images import DockerImages, compose, read_size
from treegen.search.environments.file_tools import (
    BASH_TOOL,
    FILE_TOOLS,
    MAX_CHARS,
    PURE_TOOLS,
    Files,
    FileWorld,
    ToolError,
    check_consent,
    files_of,
    write_first_files,
)
from treegen.search.environments.protocol import Observation, Traits

T = TypeVar("T")

_FOLDER_PREFIX: Final = "treegen-snapshots-"
_ARCHIVE: Final = "archive-"
_IMAGE: Final = "image-"
_SNAPSHOT_ID: Final = re.compile(f"({_ARCHIVE}|{_IMAGE})[0-9a-f]{{16}}")
_TASK_NAME: Final = "treegen"
_LIST_COMMAND: Final = "find . -mindepth 1 -type d | sed 's|$|/|'; find . -mindepth 1 ! -type d"
_ARCHIVE_SECONDS: Final = 300  # time limit for writing or unpacking an archive


class InspectEnvironment:
    """Sandboxes of Inspect, in which the model runs bash and edits files.

    `remove_leftovers` removes the images that a killed process leaves, and the containers that it
    started from them. `inspect sandbox cleanup docker` removes all containers of Inspect.

    Args:
        sandbox: Name of a provider, such as "docker", or its class. "local" does not isolate
            anything: commands run as your user.
        config: The provider's configuration, such as the path of a Dockerfile or compose file. For
            docker, it may be a function that returns the Dockerfile of a problem.
        allow_code_execution: Must be True: commands of the model run on this machine.
        files: Returns the first files of a problem.
        folder: Directory for archives, which are kept if the process is killed; None for a
            temporary one.
        run_name: Label of images, by which `remove_leftovers` finds them; None for the path of
            `folder`.
        command_seconds: Maximum seconds of a command.
        max_snapshot_bytes: Maximum bytes of all archives and images together. An image counts the
            bytes that it adds to the one before it.
        max_chars: Maximum characters of an observation's text.

    Raises:
        InputError: An argument cannot be used.

    Attributes:
        traits: What the environment can do.
        tools: Tools that run bash, and read, write and list files.
    """

    traits: Final = Traits(pure_tools=PURE_TOOLS)
    tools: Final = (BASH_TOOL, *FILE_TOOLS)

    def __init__(
        self,
        sandbox: str | type[SandboxEnvironment] = "docker",
        config: str | Callable[[Any], str] | None = None,
        *,
        allow_code_execution: bool = False,
        files: Callable[[Any], Files] = files_of,
        folder: str | Path | None = None,
        run_name: str | None = None,
        command_seconds: float = 60.0,
        max_snapshot_bytes: int = 4 << 30,
        max_chars: int = MAX_CHARS,
    ) -> None:
        check_consent(allow_code_execution, f"in Inspect's sandbox {sandbox!r:.60}")
        if isinstance(sandbox, str):
            try:
                sandbox = registry_find_sandboxenv(sandbox)
            except Exception as error:
                raise InputError(
                    f"the Inspect sandbox {sandbox!r:.60} was not found ({error!s:.200}); install "
                    "the package that provides the sandbox"
                ) from None
        self._type, self._config, self._files = sandbox, config, files
        is_docker = sandbox.__name__ == "DockerSandboxEnvironment"
        if callable(config) and not is_docker:
            raise InputError("config can be a function only with the docker sandbox; pass a string")
        is_image = not isinstance(config, str) or Path(config).name == "Dockerfile"
        self._makes_images = is_docker and is_image
        self.command_seconds, self.max_chars = command_seconds, max_chars
        self._created: set[str] = set()
        self._worlds: set[InspectWorld] = set()
        # Providers keep what they have started in context variables.
        self._context = contextvars.copy_context()
        self._started: list[str | None] = []  # configurations that the provider has prepared
        self._is_closed = False
        self._start_lock = asyncio.Lock()
        self._stack = ExitStack()
        self._keeps_folder, self._folder = folder is not None, self._open(folder)
        self._images = DockerImages(run_name or str(self._folder))
        self._sizes = {path.name: _measure(path) for path in self._folder.iterdir()}
        self._free_bytes = max_snapshot_bytes - sum(self._sizes.values())

    async def start(self, problem: Any) -> InspectWorld:
        """Return a new world with the first files of a problem.

        Raises:
            WorldError: The sandbox does not start.
        """
        config = self._config(problem) if callable(self._config) else self._config
        files = self._files(problem)  # first, because an error must leave no sandbox
        world = await self._create(config, config)
        await write_first_files(world, files)
        return world

    async def restore(self, snapshot: str) -> InspectWorld:
        """Return a new world in the state of a snapshot.

        Raises:
            InputError: There is no such snapshot.
            WorldError: The sandbox does not start.
        """
        missing = InputError(f"there is no snapshot {snapshot!r:.60}; replay the actions")
        if snapshot not in self._sizes:
            raise missing
        path = self._folder / snapshot
        try:
            data = read_bytes(path, MAX_DATA_BYTES)
        except OSError as error:
            raise InputError(describe_read_error(path, error)) from None
        if snapshot.startswith(_IMAGE):
            if data != compose(snapshot, self._sizes[snapshot]).encode():
                raise InputError(
                    f"{path} was changed after treegen wrote the file; remove the file"
                )
            if snapshot not in await self._images.tags():
                raise missing
            base = self._config
            if callable(base):
                base = self._started[0] if self._started else str(path)
            return await self._create(str(path), base)
        assert not callable(self._config)
        world = await self._create(self._config, self._config)
        try:
            await world.unpack(data)
        except BaseException:
            await world.close()
            raise
        return world

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot. An unknown id does nothing."""
        if snapshot in self._sizes:
            if snapshot.startswith(_IMAGE):
                await self._images.remove(snapshot)
            (self._folder / snapshot).unlink(missing_ok=True)
            self._created.discard(snapshot)
            self._free_bytes += self._sizes.pop(snapshot, 0)

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        """Remove what earlier processes with the same `run_name` have left; return how many things.

        Args:
            keep: Ids of snapshots that stay.
        """
        retained = {*keep, *self._created}
        old = [snapshot for snapshot in self._sizes if snapshot not in retained]
        for snapshot in old:
            await self.delete(snapshot)
        if not self._makes_images:
            return len(old)
        containers = [await self._container(world) for world in self._worlds]
        return len(old) + await self._images.remove_leftovers(retained, containers)

    async def close(self, keep: Collection[str] = ()) -> None:
        """Close all worlds and delete all snapshots that this object made.

        Args:
            keep: Ids of snapshots that stay, if there is a `folder`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        async with AsyncExitStack() as stack:  # each step runs, also if another one fails
            stack.callback(self._stack.close)
            if any(snapshot.startswith(_IMAGE) for snapshot in self._created):
                stack.push_async_callback(self._images.prune)
            for config in self._started:
                clean_up = partial(self._type.task_cleanup, _TASK_NAME, config, True)
                stack.push_async_callback(lambda end: self.call(end()), clean_up)
            for snapshot in self._created - (set(keep) if self._keeps_folder else set()):
                stack.push_async_callback(self.delete, snapshot)
            for world in [*self._worlds]:
                stack.push_async_callback(world.close)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the provider in the context of this object."""
        return await asyncio.get_running_loop().create_task(coroutine, context=self._context)

    async def save(self, world: InspectWorld) -> str:
        """Store a snapshot of a world, and return its id; see `InspectWorld.snapshot`."""
        snapshot = f"{_IMAGE if self._makes_images else _ARCHIVE}{secrets.token_hex(8)}"
        if self._makes_images:
            container = await self._container(world)
            size = await self._images.measure(container)
            data = compose(snapshot, size).encode()
        else:
            data = await world.pack()
            size = len(data)
        if size > self._free_bytes:
            raise CapacityError(
                f"a snapshot needs {size:,} bytes, but the {len(self._sizes):,} stored snapshots "
                f"leave only {self._free_bytes:,}; raise {arg('max_snapshot_bytes')}"
            )
        self._free_bytes -= size
        self._sizes[snapshot] = size
        self._created.add(snapshot)
        try:
            if self._makes_images:
                await self._images.commit(container, snapshot)
            with replace_file(self._folder / snapshot) as file:
                file.write(data)
        except BaseException as error:
            with suppress(WorldError):
                await self.delete(snapshot)
            if isinstance(error, OSError):
                raise WorldError(f"a snapshot cannot be stored: {error}; check the disk") from None
            raise
        return snapshot

    async def end(self, world: InspectWorld) -> None:
        """Free the sandboxes of a world."""
        arguments = (_TASK_NAME, world.config, dict(world.sandboxes), False)
        await self.call(self._type.sample_cleanup(*arguments))
        self._worlds.discard(world)

    async def _container(self, world: InspectWorld) -> str:
        """Return the name of a world's container."""
        return str((await self.call(world.sandbox.connection())).container)

    async def _create(self, config: str | None, base: str | None) -> InspectWorld:
        """Return a new world.

        Args:
            config: Its configuration.
            base: The configuration that the provider prepares before, once.
        """
        if self._is_closed:
            raise StoppedError("the environment is closed; create a new environment")
        try:
            async with self._start_lock:
                if base not in self._started:
                    await self.call(self._type.task_init(_TASK_NAME, base))
                    self._started.append(base)
            sandboxes = await self.call(self._type.sample_init(_TASK_NAME, config, {}))
        except Exception as error:
            raise WorldError(
                f"Inspect's sandbox failed to start: {type(error).__name__}: {error!s:.300}; "
                "check the sandbox with `inspect eval`"
            ) from error
        world = InspectWorld(self, sandboxes, config)
        self._worlds.add(world)
        return world

    def _open(self, folder: str | Path | None) -> Path:
        if folder is not None:
            path = Path(folder).absolute()
            try:
                path.mkdir(parents=True, exist_ok=True)
                os.listdir(path)
            except OSError as error:
                raise InputError(
                    f"cannot store snapshots in {path}: {error.strerror}; choose another "
                    f"{arg('folder')}"
                ) from None
            sweep(path, f"{_ARCHIVE}*.tmp")  # half-written files of killed processes
            sweep(path, f"{_IMAGE}*.tmp")
            return path
        above = Path(tempfile.gettempdir())
        sweep(above, f"{_FOLDER_PREFIX}*")  # killed processes may have left some
        path = above / f"{_FOLDER_PREFIX}{secrets.token_hex(8)}"
        self._stack.callback(path.rmdir)
        self._stack.enter_context(create_locked(path, folder=True))
        return path


def _measure(path: Path) -> int:
    """Return the bytes of a snapshot that an earlier process has stored.

    Raises:
        InputError: The file is none.
    """
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    if not _SNAPSHOT_ID.fullmatch(path.name) or path.is_symlink():
        raise InputError(
            f"{name} was not stored by treegen; move the file out of the folder, or choose "
            f"another {arg('folder')}"
        )
    try:
        with open(open_regular(path), "rb") as file:
            if path.name.startswith(_ARCHIVE):
                return os.fstat(file.fileno()).st_size
            size = read_size(file.read(1000).decode("utf-8", "replace"))
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from None
    if size < 0:
        raise InputError(f"{name} was changed after treegen wrote the file; remove the file")
    return size


class InspectWorld(FileWorld):
    """One sandbox. `InspectEnvironment` creates it."""

    def __init__(
        self,
        environment: InspectEnvironment,
        sandboxes: Mapping[str, SandboxEnvironment],
        config: str | None,
    ) -> None:
        super().__init__(environment.tools, environment.max_chars)
        self.sandboxes, self.config = sandboxes, config
        self.sandbox = next(iter(sandboxes.values()))  # Inspect's default
        self._environment = environment
        self._is_closed = self._is_ended = False

    async def execute(self, command: str, seconds: float | None = None) -> Observation:
        """Run a command of bash, and return its output.

        Args:
            command: The command.
            seconds: Maximum seconds. Default: the environment's limit.

        Raises:
            WorldError: The sandbox fails.
        """
        seconds = seconds or self._environment.command_seconds
        try:
            result = await self._exec(["bash", "--login", "-c", command], seconds)
        except TimeoutError:
            return self.show("", "", -9, f"more than {seconds:g} s")
        except OutputLimitExceededError as error:
            return self.show(error.truncated_output or "", "", -9, "too much output")
        return self.show(result.stdout, result.stderr, result.returncode)

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ToolError: There is no such file, or it is too large.
        """
        with _convert_path_errors(path):
            return await self._call(self.sandbox.read_file(path, text=False))

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the directories above it.

        Raises:
            ToolError: The path cannot be written.
        """
        with _convert_path_errors(path):
            await self._call(self.sandbox.write_file(path, data))

    async def list_files(self) -> list[str]:
        """Return the paths of all files; those of directories end with a slash.

        Raises:
            WorldError: No file can be listed. Directories that cannot be read are left out.
        """
        result = await self._run_in_time(["sh", "-c", _LIST_COMMAND])
        if not result.success and not result.stdout:
            raise _failure("find", result)
        return [line.removeprefix("./") for line in result.stdout.splitlines()]

    async def snapshot(self) -> str:
        """Store the working directory, or with docker all files; return the id of the snapshot.

        Raises:
            CapacityError: The snapshots would take too much space.
            WorldError: The snapshot cannot be made.
        """
        return await self._environment.save(self)

    async def close(self) -> None:
        """Free the sandbox. Snapshots stay. A second call does nothing, unless the first failed."""
        self._is_closed = True
        if not self._is_ended:
            await self._environment.end(self)
            self._is_ended = True

    async def pack(self) -> bytes:
        """Return an archive of the working directory.

        Raises:
            WorldError: The directory cannot be read, or is too large.
        """
        name = f".treegen-{secrets.token_hex(8)}.tar"
        await self._run_checked(["tar", "-cf", name, f"--exclude=./{name}", "."])
        try:
            return await self._call(self.sandbox.read_file(name, text=False))
        except OutputLimitExceededError as error:
            raise WorldError(f"a working directory is too large for a snapshot: {error}") from None
        finally:
            await self._run_checked(["rm", "-f", name])

    async def unpack(self, archive: bytes) -> None:
        """Replace the working directory, which has no files of value, by an archive's files.

        Raises:
            WorldError: The archive cannot be unpacked.
        """
        name = f".treegen-{secrets.token_hex(8)}.tar"
        await self._call(self.sandbox.write_file(name, archive))
        await self._run_checked(["find", ".", "-mindepth", "1", "!", "-name", name, "-delete"])
        await self._run_checked(["tar", "-xpf", name])
        await self._run_checked(["rm", "-f", name])

    async def _run_checked(self, command: list[str]) -> None:
        result = await self._run_in_time(command)
        if not result.success:
            raise _failure(command[0], result)

    async def _run_in_time(self, command: list[str]) -> ExecResult[str]:
        try:
            return await self._exec(command, _ARCHIVE_SECONDS)
        except (TimeoutError, OutputLimitExceededError) as error:
            raise WorldError(
                f"{command[0]} did not finish in a sandbox ({error}); try again"
            ) from None

    async def _exec(self, command: list[str], seconds: float) -> ExecResult[str]:
        timeout = math.ceil(seconds)
        return await self._call(self.sandbox.exec(command, timeout=timeout, timeout_retry=False))

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the sandbox; raise WorldError for failures of the sandbox itself."""
        if self._is_closed:
            coroutine.close()
            raise StoppedError("the world is closed; restore a snapshot")
        try:
            return await self._environment.call(coroutine)
        except (OSError, OutputLimitExceededError, UnicodeError, ValueError):
            raise
        except Exception as error:
            raise WorldError(
                f"Inspect's sandbox failed: {type(error).__name__}: {error!s:.300}; run the search "
                "again"
            ) from error


def _failure(command: str, result: ExecResult[str]) -> WorldError:
    return WorldError(
        f"{command} failed in a sandbox: {result.stderr.strip()[-200:]}; free disk space, or "
        "install the command in the image"
    )


@contextmanager
def _convert_path_errors(path: str) -> Iterator[None]:
    """Raise ToolError for a path that the model cannot use."""
    try:
        yield
    except OutputLimitExceededError as error:
        raise ToolError(f"{path!r:.200} is too large: {error!s:.200}") from None
    except ValueError:
        raise ToolError(f"no file can have the name {path!r:.200}") from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        why = {FileNotFoundError: "does not exist", IsADirectoryError: "is a directory"}
        reason = why.get(type(error), "cannot be used: permission denied, or a part is a file")
        raise ToolError(f"{path!r:.200} {reason}") from None
