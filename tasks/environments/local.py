"""Worlds that are directories of this machine, in which programs run in treegen's sandbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from treegen.common.cores import count_cores
from treegen.errors import InputError, StoppedError, arg
from treegen.search.environments.file_tools import (
    FILE_TOOLS,
    MAX_CHARS,
    PURE_TOOLS,
    Files,
    check_consent,
    files_of,
    make_tool,
)
from treegen.search.environments.protocol import Traits
from treegen.tasks.environments.directories import DirectorySize
from treegen.tasks.environments.local_world import Host, LocalWorld
from treegen.tasks.environments.storage import Storage
from treegen.tasks.sandbox.canaries import choose_tier
from treegen.tasks.sandbox.programs import MIB, Limits
from treegen.tasks.sandbox.runtime import find_runtime
from treegen.tasks.sandbox.tiers import SandboxTier, Workspace, choose_workspace_uid

LIMITS: Final = Limits(
    cpu_seconds=10.0, wall_seconds=30.0, scratch=32 * MIB, files=1_000, open_files=32
)
GAPS: Final = (
    "disk space of a working directory is limited by looking every 20 ms; a running program may "
    "take more by files that it has removed and keeps open",
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
        most = DirectorySize(limits.files, limits.scratch)
        self._storage = Storage(folder, most, max_snapshot_bytes)
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
        for world in [*self._host.worlds]:
            await world.close()
        await self._host.call(self._storage.close, keep)
        self._host.executor.shutdown()

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
