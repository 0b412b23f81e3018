"""Worlds that are directories of this machine, in which programs run in treegen's sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from treegen.common.cores import count_cores
from treegen.errors import InputError, StoppedError, WorldError, arg
from treegen.search.environments.file_tools import (
    FILE_TOOLS,
    MAX_CHARS,
    PURE_TOOLS,
    Files,
    FileWorld,
    ToolError,
    check_consent,
    files_of,
    make_tool,
    read_files,
)
from treegen.search.environments.protocol import Observation, Traits
from treegen.tasks.environments.directories import (
    MAX_DEPTH,
    DirectoryLimitError,
    DirectorySize,
    copy_tree,
    list_tree,
    measure_and_fix_modes,
    open_folder,
    read_beneath,
    remove_tree,
    write_beneath,
)
from treegen.tasks.environments.storage import Storage
from treegen.tasks.sandbox.canaries import choose_tier
from treegen.tasks.sandbox.isolation import SandboxTier, Workspace, choose_workspace_uid
from treegen.tasks.sandbox.pool import decide
from treegen.tasks.sandbox.process import SandboxProcess
from treegen.tasks.sandbox.programs import (
    MIB,
    Limits,
    Program,
    ProgramStatus,
    SandboxError,
    TestCase,
)
from treegen.tasks.sandbox.runtime import Runtime, find_runtime

P = ParamSpec("P")
T = TypeVar("T")
# The first entry of Python's path, as for a script that is started in the directory.
_PRELUDE: Final = "__import__('sys').path.insert(0, '')"
_REASONS: Final = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "has a part that is not a directory",
    errno.EISDIR: "is a directory",
    errno.EINVAL: "is not a regular file",
    errno.ENAMETOOLONG: "is too long for a path",
    errno.ELOOP: "is a loop of symbolic links",
    errno.EXDEV: "leads out of the working directory; use a relative path",
}


@dataclass(frozen=True, slots=True)
class Host:
    """Objects that the worlds of one environment share."""

    storage: Storage
    executor: ThreadPoolExecutor
    tier: SandboxTier
    runtime: Runtime
    limits: Limits
    tools: Sequence[dict[str, Any]]
    max_chars: int
    worlds: set[LocalWorld] = field(default_factory=set)
    """The open worlds."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread of the environment.

        Raises:
            WorldError: Files of the environment cannot be read or written.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.executor, lambda: function(*args, **kwargs))
        except (OSError, DirectoryLimitError) as error:
            raise WorldError(
                f"the working directory could not be used: {error}; check the disk"
            ) from error


class LocalWorld(FileWorld):
    """One directory. `LocalEnvironment` creates it.

    Attributes:
        workspace: The directory and its owner.
    """

    def __init__(self, host: Host, workspace: Workspace) -> None:
        super().__init__(host.tools, host.max_chars)
        self.workspace = workspace
        self._host, self._storage = host, host.storage
        host.worlds.add(self)
        self._process: SandboxProcess | None = None
        self._lock = threading.RLock()  # a cancelled action may still run in its thread
        self._is_cancelled = self._is_closed = False

    async def execute(self, command: str, seconds: float | None = None) -> Observation:
        """Run a Python program in the directory.

        Args:
            command: Source of the program.
            seconds: Not used: the limits of all programs are those of the environment.

        Raises:
            WorldError: The sandbox failed.
        """
        try:
            return await self._host.call(self._execute, command)
        except asyncio.CancelledError:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()
            raise

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ToolError: There is no such file in the directory.
        """
        return await self._host.call(self._read, path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the directories above it.

        Raises:
            ToolError: The path is not in the directory, or the file is too large.
        """
        await self._host.call(self._write, path, data)

    async def list_files(self) -> list[str]:
        """Return the paths of all files; those of directories end with a slash."""
        return await self._host.call(self._list)

    async def snapshot(self) -> str:
        """Store a copy of the directory, and return its id.

        Raises:
            CapacityError: The snapshots would take too much space.
            WorldError: An action was ended by a limit, so the state is arbitrary.
        """
        return await self._host.call(self._snapshot)

    async def close(self) -> None:
        """End the sandbox and remove the directory. A second call does nothing."""
        if self in self._host.worlds:
            await self._host.call(self.remove)

    def fill(self, files: Files) -> None:
        """Write the first files; see `LocalEnvironment.start`."""
        max_size = self._storage.max_size
        try:
            if isinstance(files, Path):
                if not files.is_dir():
                    raise InputError(
                        f"the first files of a problem must be a directory, got {files}"
                    )
                with open_folder(files) as source, open_folder(self.workspace.path) as folder:
                    copy_tree(source, folder, max_size, self.workspace.uid)
                    measure_and_fix_modes(folder, max_size)
            else:
                content = read_files(files)
                self._check_room(len(content), sum(map(len, content.values())))
                with self._open() as folder:
                    for path, data in content.items():
                        self._put(folder, path, data)
                    measure_and_fix_modes(folder, max_size)
        except (DirectoryLimitError, ToolError) as error:
            raise InputError(
                f"the first files of a problem could not be used: {error}; change the files, or "
                f"raise {arg('limits')}"
            ) from None

    def load(self, snapshot: str) -> None:
        """Write the files of a snapshot; see `LocalEnvironment.restore`."""
        self._storage.load(snapshot, self.workspace.path, self.workspace.uid)

    def remove(self) -> None:
        """End the sandbox and remove the directory."""
        with self._lock:
            self._is_closed = True
            self._end_process()
            remove_tree(self.workspace.path)
        self._host.worlds.discard(self)

    def _execute(self, source: str) -> Observation:
        program = Program(source, prelude=_PRELUDE)
        limits = self._host.limits
        with self._open() as folder:
            try:
                outcome = self._start_process().run(program, TestCase())
                result = decide(program, TestCase(), outcome, limits, lambda *_: True)
                if result.verdict is ProgramStatus.JUDGE_ERROR:
                    raise SandboxError(f"the sandbox failed: {result.detail}")
            except SandboxError as error:
                self._end_process()
                raise WorldError(f"{str(error).partition(';')[0]}; run the search again") from error
            is_limit = result.verdict in (ProgramStatus.TIMEOUT, ProgramStatus.OUTPUT_LIMIT)
            failure = result.detail if is_limit else ""
            try:
                measure_and_fix_modes(folder, self._storage.max_size)
            except DirectoryLimitError as error:
                failure = failure or f"the working directory has {error}"
        stdout, stderr = (
            data.decode("utf-8", "replace") for data in (outcome.stdout, outcome.stderr)
        )
        if result.verdict is ProgramStatus.COMPILE_ERROR:
            stderr = result.detail
        return self.show(stdout, stderr, outcome.exit_info["status"], failure)

    def _read(self, path: str) -> bytes:
        with self._open() as folder, _convert_path_errors(path):
            return read_beneath(folder, path, self._storage.max_size.size)

    def _write(self, path: str, data: bytes) -> None:
        with self._open() as folder:
            used = measure_and_fix_modes(folder, self._storage.max_size)
            self._check_room(used.files + path.count("/") + 1, used.size + len(data))
            self._put(folder, path, data)

    def _check_room(self, num_files: int, num_bytes: int) -> None:
        max_size = self._storage.max_size
        if num_files > max_size.files or num_bytes > max_size.size:
            raise ToolError(
                f"the working directory may have {max_size.files:,} files and "
                f"{max_size.size:,} bytes"
            )

    def _put(self, folder: int, path: str, data: bytes) -> None:
        """Write a file, whatever the size of the directory."""
        if path.count("/") >= MAX_DEPTH:
            raise ToolError(f"a path may have {MAX_DEPTH} parts")
        with _convert_path_errors(path):
            write_beneath(folder, path, data, self.workspace.uid)

    def _list(self) -> list[str]:
        with self._open() as folder:
            return list_tree(folder)

    def _snapshot(self) -> str:
        if self.failure:
            raise WorldError(
                f"a failed world cannot be stored ({self.failure}); restore an earlier snapshot"
            )
        with self._open():
            return self._storage.save(self.workspace.path)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Open the directory for one action at a time."""
        with self._lock:
            if self._is_closed:
                raise StoppedError("the world is closed; restore a snapshot")
            with open_folder(self.workspace.path) as folder:
                yield folder

    def _start_process(self) -> SandboxProcess:
        if self._process is None:
            host = self._host
            self._process = SandboxProcess(host.tier, host.runtime, host.limits, self.workspace)
        if self._is_cancelled:  # perhaps before there was a helper to kill
            raise SandboxError("the action was cancelled")
        return self._process

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


@contextmanager
def _convert_path_errors(path: str) -> Iterator[None]:
    """Raise ToolError for a path that the model cannot use."""
    try:
        yield
    except ValueError:
        raise ToolError(f"no file can have the name {path!r:.200}") from None
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise ToolError(f"{path!r:.200} {_REASONS[error.errno]}") from None


LIMITS: Final = Limits(
    cpu_seconds=10.0, wall_seconds=30.0, scratch=32 * MIB, files=1_000, open_files=32
)
GAPS: Final = (
    "disk space of a working directory is checked only every 20 ms; a running program may use more "
    "with removed files that it keeps open",
)
_PYTHON: Final = make_tool(
    "python",
    "Run a Python program in the working directory, and return what it prints. Files stay for "
    "later programs. Variables do not. It can import modules of the working directory and the "
    "standard library. It can neither start other programs nor use the network.",
    code="Source of the program.",
)


class LocalEnvironment:
    """Directories in treegen's sandbox, in which the model writes files and runs Python programs.

    Snapshots are copies of the directory. They share the blocks of unchanged files where the file
    system supports this ("reflinks"). Programs end with their action, so a snapshot is complete.

    Args:
        allow_code_execution: Must be True: programs of the model run on this machine.
        sandbox: The sandbox; see `treegen.tasks.sandbox.SandboxPool`.
        limits: Limits of each program, and of the directory (`scratch` and `files`).
        folder: Directory for worlds and snapshots, which keeps snapshots if the process is killed;
            None for a temporary one. It must be new or empty, or come from an earlier environment.
        files: Returns the first files of a problem.
        max_snapshot_bytes: Maximum bytes of all snapshots together.
        num_workers: Maximum number of programs and copies at once; None for one per core.
        packages: Installed packages that programs may import.
        max_chars: Maximum characters of an observation's text.

    Raises:
        InputError: An argument cannot be used, or the folder is in use.
        SandboxError: No allowed sandbox holds here.

    Attributes:
        report: The sandbox in use and its gaps.
    """

    def __init__(
        self,
        *,
        allow_code_execution: bool = False,
        sandbox: str = "auto",
        limits: Limits = LIMITS,
        folder: str | os.PathLike[str] | None = None,
        files: Callable[[Any], Files] = files_of,
        max_snapshot_bytes: int = 4096 * MIB,
        num_workers: int | None = None,
        packages: Sequence[str] = (),
        max_chars: int = MAX_CHARS,
    ) -> None:
        check_consent(allow_code_execution, "on this machine")
        if num_workers is not None and num_workers < 1:
            raise InputError(f"{arg('num_workers')} must be at least 1, got {num_workers}")
        runtime = find_runtime(tuple(packages))
        max_size = DirectorySize(limits.files, limits.scratch)
        self._storage = Storage(folder, max_size, max_snapshot_bytes)
        try:
            tier, self.report = choose_tier(sandbox, runtime, self._create_workspace)
            self._storage.remove_worlds()  # those of the attempts to break out
        except BaseException:
            self._storage.close()
            raise
        executor = ThreadPoolExecutor(num_workers or count_cores(), "worlds")
        self._host = Host(self._storage, executor, tier, runtime, limits, self.tools, max_chars)
        self._files = files
        self._is_closed = False

    @property
    def traits(self) -> Traits:
        """What it can do."""
        return Traits(forks_cheaply=True, pure_tools=PURE_TOOLS)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools that run a program, and read, write and list files."""
        return (_PYTHON, *FILE_TOOLS)

    def describe(self) -> list[str]:
        """Return lines for the user: the sandbox and its gaps, and how worlds are forked."""
        how = (
            "copies that share blocks (reflinks)" if self._storage.has_reflinks else "plain copies"
        )
        gaps = [] if self.report.tier == "none" else [f"not protected: {gap}" for gap in GAPS]
        return [*self.report.lines(), *gaps, f"forks: {how}; processes end with their action"]

    async def start(self, problem: Any) -> LocalWorld:
        """Return a new world with the first files of a problem.

        Raises:
            InputError: The files are too large, or lie outside of the directory.
        """
        files = self._files(problem)
        return await self._create(lambda world: world.fill(files))

    async def restore(self, snapshot: str) -> LocalWorld:
        """Return a new world with the files of a snapshot.

        Raises:
            InputError: There is no such snapshot.
        """
        return await self._create(lambda world: world.load(snapshot))

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot. An unknown id does nothing."""
        await self._host.call(self._storage.delete, snapshot)

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        """Delete the snapshots of earlier processes in `folder`, and return how many.

        Args:
            keep: Ids of snapshots that stay.
        """
        return await self._host.call(self._storage.delete_older, keep)

    async def close(self, keep: Collection[str] = ()) -> None:
        """Close all worlds and delete the snapshots that this object made.

        Args:
            keep: Ids of snapshots that stay, if there is a `folder`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        async with AsyncExitStack() as stack:  # an error of one world does not keep the others open
            stack.callback(self._host.executor.shutdown)
            stack.push_async_callback(self._host.call, self._storage.close, keep)
            for world in [*self._host.worlds]:
                stack.push_async_callback(world.close)

    async def _create(self, fill: Callable[[LocalWorld], None]) -> LocalWorld:
        if self._is_closed:
            raise StoppedError("the environment is closed; create a new one")

        def create() -> LocalWorld:
            world = LocalWorld(self._host, self._create_workspace(self._host.tier))
            try:
                fill(world)
            except BaseException:
                world.remove()
                raise
            return world

        return await self._host.call(create)

    def _create_workspace(self, tier: SandboxTier) -> Workspace:
        uid = choose_workspace_uid(tier)
        return Workspace(self._storage.create_world(uid), uid)
