"""One world in a sandbox of Inspect."""

from __future__ import annotations

import math
import secrets
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment

from treegen.errors import StoppedError, WorldError
from treegen.search.environments.file_tools import FileWorld, ToolError
from treegen.search.environments.protocol import Observation

T = TypeVar("T")

_LIST_COMMAND: Final = "find . -mindepth 1 -type d | sed 's|$|/|'; find . -mindepth 1 ! -type d"
_ARCHIVE_SECONDS: Final = 300  # time limit for writing or unpacking an archive


class Owner(Protocol):
    """What a world needs of the environment that created it."""

    command_seconds: float
    max_chars: int

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools of its worlds."""
        ...

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the provider."""
        ...

    async def save(self, world: InspectWorld) -> str:
        """Store a snapshot of a world, and return its id."""
        ...

    async def end(self, world: InspectWorld) -> None:
        """Free the sandboxes of a world."""
        ...


class InspectWorld(FileWorld):
    """One sandbox. `InspectEnvironment` creates it."""

    def __init__(
        self, owner: Owner, sandboxes: Mapping[str, SandboxEnvironment], config: str | None
    ) -> None:
        super().__init__(owner.tools, owner.max_chars)
        self.sandboxes, self.config = sandboxes, config
        self.sandbox = next(iter(sandboxes.values()))  # Inspect's default
        self._owner = owner
        self._is_closed = self._is_ended = False

    async def execute(self, command: str, seconds: float | None = None) -> Observation:
        """Run a command of bash, and return its output.

        Args:
            command: The command.
            seconds: Maximum seconds. Default: the environment's limit.

        Raises:
            WorldError: The sandbox fails.
        """
        seconds = seconds or self._owner.command_seconds
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
        return await self._owner.save(self)

    async def close(self) -> None:
        """Free the sandbox. Snapshots stay. A second call does nothing, unless the first failed."""
        self._is_closed = True
        if not self._is_ended:
            await self._owner.end(self)
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
            return await self._owner.call(coroutine)
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
