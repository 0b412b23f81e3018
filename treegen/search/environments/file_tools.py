"""Worlds that are a directory: tools that run a command, and read, write and list files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treegen.common.files import describe_read_error, read_bytes
from treegen.errors import InputError, arg
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation

Files = Mapping[str, str | bytes] | Path
"""The first files of a world, by path, or a directory to copy."""

PURE_TOOLS: Final = frozenset({"read_file", "list_files"})
MAX_CHARS: Final = 16_000
"""Maximum characters of an observation's text, by default."""
_MAX_LISTED: Final = 1_000


class ToolError(Exception):
    """A tool cannot do what the model asks for; the message is for the model."""


def make_tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """Return the JSON schema of a tool, in OpenAI's format of function tools.

    Args:
        name: Name of the tool.
        description: What it does, for the model.
        arguments: Description of each argument. All are required strings.
    """
    properties = {key: {"type": "string", "description": arguments[key]} for key in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_PATH: Final = "Path of the file, relative to the working directory."
FILE_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    make_tool("read_file", "Return the text of a file.", path=_PATH),
    make_tool(
        "write_file",
        "Write a file, and the directories above it. An existing file is replaced.",
        path=_PATH,
        text="The new text of the file.",
    ),
    make_tool("list_files", "List all files below the working directory."),
)
BASH_TOOL: Final = make_tool(
    "bash",
    "Run a command of bash in the working directory, and return its output. Files stay for later "
    "commands. Variables and processes do not.",
    command="The command.",
)


def check_consent(allow_code_execution: bool, what: str) -> None:
    """Raise InputError unless the user allows an environment to run what the model writes.

    Args:
        allow_code_execution: Whether the user allows it.
        what: Where the commands run, for the message, such as "on this machine".

    Raises:
        InputError: The user does not allow it.
    """
    if not allow_code_execution:
        raise InputError(
            f"the environment runs commands of the model {what}; allow it with "
            f"{arg('allow_code_execution', True)}"
        )


def files_of(problem: Any) -> Files:
    """Return the first files of a problem: `metadata["files"]`, texts by path."""
    files: Files = problem.metadata.get("files", {})
    return files


def read_files(files: Files) -> dict[str, bytes]:
    """Return the first files of a world as bytes, by path.

    Args:
        files: The files by path, or a directory of which all regular files are read.

    Raises:
        InputError: The directory cannot be read.
    """
    if not isinstance(files, Path):
        return {
            path: data.encode() if isinstance(data, str) else data for path, data in files.items()
        }
    try:
        paths = [path for path in files.rglob("*") if path.is_file() and not path.is_symlink()]
        read = {str(path.relative_to(files)): read_bytes(path) for path in paths}
    except OSError as error:
        raise InputError(describe_read_error(files, error)) from None
    if not files.is_dir():
        raise InputError(f"the initial files of a problem must be a directory, got {files}")
    return read


class FileWorld(ABC):
    """A world that is a directory of files, in which commands run.

    A subclass implements how commands run and how files are read, written and listed. These methods
    raise `ToolError` if the model's request cannot be met.

    Args:
        tools: The tools of the world. The tool that is not one of `FILE_TOOLS` runs a command, its
            only argument.
        max_chars: Maximum characters of an observation's text. The middle of a longer text is left
            out.

    Attributes:
        failure: Why an action did not end by itself; "" if all did. Later actions are not run.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], max_chars: int = MAX_CHARS) -> None:
        self.failure = ""
        self._max_chars = max_chars
        functions = [tool["function"] for tool in tools]
        self._arguments = {f["name"]: tuple(f["parameters"]["properties"]) for f in functions}

    async def run(self, action: ToolCall) -> Observation:
        """Run a tool call and return what it shows.

        Raises:
            WorldError: The environment itself failed.
        """
        if self.failure:
            return Observation(failure=self.failure)
        try:
            arguments = self._check(action)
            match action.name:
                case "read_file":
                    text = (await self.read_file(arguments[0])).decode("utf-8", "replace")
                case "write_file":
                    data = arguments[1].encode("utf-8", "backslashreplace")
                    await self.write_file(arguments[0], data)
                    text = f"Wrote {len(data):,} bytes to {arguments[0]}."
                case "list_files":
                    return await self.observe()
                case _:
                    observation = await self.execute(arguments[0])
                    self.failure = observation.failure
                    return observation
        except ToolError as error:
            text = f"Error: {error}"
        return Observation(text=self.clip(text))

    async def observe(self) -> Observation:
        """Return the list of all files."""
        paths = sorted(await self.list_files())
        left_out = [f"[{len(paths) - _MAX_LISTED:,} more]"] if len(paths) > _MAX_LISTED else []
        lines = [path.encode("utf-8", "backslashreplace").decode() for path in paths[:_MAX_LISTED]]
        return Observation(text=self.clip("\n".join(lines + left_out) or "[no files]"))

    @abstractmethod
    async def close(self) -> None:
        """Free what the world holds; see `World.close`."""

    @abstractmethod
    async def execute(self, command: str, seconds: float | None = None) -> Observation:
        """Run a command in the directory, and return its output, exit status and failure.

        Args:
            command: The command.
            seconds: Maximum seconds, for environments whose limits are not fixed. Default: the
                environment's limit.
        """

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the directories above it."""

    @abstractmethod
    async def list_files(self) -> list[str]:
        """Return the paths of all files and directories; those of directories end with a slash."""

    def show(self, stdout: str, stderr: str, exit_status: int, failure: str = "") -> Observation:
        """Return the observation of a command that ended.

        Args:
            stdout: What it printed.
            stderr: What it printed to stderr.
            exit_status: Its exit status; a negative number is a signal.
            failure: See `Observation.failure`.
        """
        parts = [stdout.rstrip("\n"), stderr.rstrip("\n")]
        if exit_status and not failure:
            parts.append(f"[exit status {exit_status}]")
        text = "\n".join(part for part in parts if part) or "[no output]"
        return Observation(text=self.clip(text), exit_status=exit_status, failure=failure)

    def clip(self, text: str) -> str:
        """Return a text without its middle if it is too long."""
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        left_out = f"\n[... {len(text) - 2 * half:,} characters left out ...]\n"
        return text[:half] + left_out + text[len(text) - half :]

    def _check(self, action: ToolCall) -> list[str]:
        """Return the arguments of a call in the order of the tool's schema."""
        names = self._arguments.get(action.name)
        if names is None:
            raise ToolError(f"there is no tool {action.name!r}; use {', '.join(self._arguments)}")
        if set(action.arguments) != set(names):
            expected = ", ".join(names) or "no arguments"
            actual = ", ".join(map(str, action.arguments)) or "none"
            raise ToolError(f"{action.name} takes {expected}; got {actual}")
        values = [action.arguments[name] for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str):
                raise ToolError(f"{name} must be a string, got {type(value).__name__}")
        return values


async def write_first_files(world: FileWorld, files: Files) -> None:
    """Write the first files of a problem into a new world; close it if they cannot be written.

    Args:
        world: The world.
        files: As for `read_files`.

    Raises:
        InputError: The files cannot be read, or the world cannot have them.
        WorldError: The world fails.
    """
    try:
        for path, data in read_files(files).items():
            await world.write_file(path, data)
    except ToolError as error:
        await world.close()
        raise InputError(f"the initial files of a problem cannot be used: {error}") from None
    except BaseException:
        await world.close()
        raise
