"""Worlds in sandboxes of Inspect. Docker does not run in the tests: a stand-in takes its calls."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from treegen.errors import CapacityError, InputError, StoppedError, WorldError
from treegen.evals.problem import Problem
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation

if TYPE_CHECKING:
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

    from treegen.integrations.inspect_ai.environment import InspectEnvironment
    from treegen.integrations.inspect_ai.world import InspectWorld
else:
    pytest.importorskip("inspect_ai")
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

    from treegen.integrations.inspect_ai.environment import InspectEnvironment
    from treegen.integrations.inspect_ai.world import InspectWorld

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
T = TypeVar("T")
PROBLEM = Problem(
    "p", "", "", metadata={"files": {"note.txt": "hello\n", "pack/a b.py": "x = 1\n"}}
)


def use(
    body: Callable[[InspectEnvironment], Awaitable[T]], sandbox: Any = "local", **options: Any
) -> T:
    """Run a coroutine with an environment, and close it."""

    async def run() -> T:
        environment = InspectEnvironment(sandbox, allow_code_execution=True, **options)
        try:
            return await body(environment)
        finally:
            await environment.close()

    try:
        return asyncio.run(run())
    finally:
        gc.collect()  # of pipes to commands that Inspect ended and left open


async def call(world: InspectWorld, tool: str, **arguments: Any) -> Observation:
    return await world.run(ToolCall(tool, arguments))


async def bash(world: InspectWorld, command: str) -> Observation:
    return await call(world, "bash", command=command)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, in which nothing may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_tools(empty: Path) -> None:
    async def body(environment: InspectEnvironment) -> None:
        world = await environment.start(PROBLEM)
        assert (await world.observe()).text == "note.txt\npack/\npack/a b.py"
        shown = await bash(world, "cat note.txt; echo more > new; echo oops >&2; exit 3")
        assert shown == Observation(text="hello\noops\n[exit status 3]", exit_status=3)
        assert (await call(world, "read_file", path="new")).text == "more\n"
        shown = await call(world, "write_file", path="a/b/c.txt", text="\u00e9")
        assert shown.text == "Wrote 2 bytes to a/b/c.txt."
        assert (await bash(world, "cat a/b/c.txt")).text == "\u00e9"
        for path, error in (
            ("missing", "does not exist"),
            ("pack", "is a directory"),
            ("a\0", "no"),
        ):
            assert error in (await call(world, "read_file", path=path)).text
        assert "is a directory" in (await call(world, "write_file", path="pack", text="")).text
        assert "a part is a file" in (await call(world, "read_file", path="new/x")).text

    use(body)
    assert not [*empty.iterdir()]


def test_forks(empty: Path) -> None:
    async def body(environment: InspectEnvironment) -> None:
        first = await environment.start(PROBLEM)
        await bash(
            first,
            "chmod 750 note.txt; ln -s note.txt link; ln note.txt hard; mkdir -m 700 closed;"
            "mkfifo pipe; printf x > $'\\xff name'; truncate -s 1M hole",
        )
        snapshot = await first.snapshot()
        assert snapshot.startswith("archive-")
        await bash(first, "rm note.txt")
        left, right = [await environment.restore(snapshot) for _ in range(2)]
        states = "stat -c '%n %A %h %N' *; cat hard; find . | wc -l"
        assert (await bash(left, states)).text == (await bash(right, states)).text
        assert "-rwxr-x--- 2" in (await bash(left, states)).text
        await bash(left, "echo left > note.txt")
        assert (await bash(right, "cat note.txt link")).text == "hello\nhello"
        await left.close()
        await left.close()
        with pytest.raises(StoppedError, match="world is closed"):
            await bash(left, "true")
        again = await environment.restore(await right.snapshot())
        assert (await bash(again, states)).text == (await bash(right, states)).text
        await environment.delete(snapshot)
        await environment.delete(snapshot)
        for unknown in (snapshot, "../x", "archive-../../etc/pass", ""):
            await environment.delete(unknown)
            with pytest.raises(InputError, match="there is no snapshot"):
                await environment.restore(unknown)

    use(body)
    assert not [*empty.iterdir()]


def test_a_limit_ends_its_own_branch_only(empty: Path) -> None:
    async def body(environment: InspectEnvironment) -> None:
        worlds = [await environment.start(PROBLEM) for _ in range(3)]
        shown = await asyncio.gather(
            bash(worlds[0], "sleep 100"),
            bash(worlds[1], "yes"),
            bash(worlds[2], "cat note.txt"),
        )
        assert shown[0].failure == "more than 1 s"
        assert shown[1].failure in ("more than 1 s", "too much output")
        assert shown[2] == Observation(text="hello", exit_status=0)
        assert await bash(worlds[0], "true") == Observation(failure="more than 1 s")

    use(body, command_seconds=1.0)


def test_archives_have_a_quota_and_survive_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "archives"

    async def leave(environment: InspectEnvironment) -> str:
        world = await environment.start(PROBLEM)
        snapshot = await world.snapshot()
        await bash(world, "head -c 300000 /dev/urandom > big")
        with pytest.raises(CapacityError, match="raise max_snapshot_bytes"):
            await world.snapshot()
        environment._sizes.clear()  # as if the process had been killed
        return snapshot

    snapshot = use(leave, folder=folder, max_snapshot_bytes=200_000)

    async def body(environment: InspectEnvironment) -> None:
        world = await environment.restore(snapshot)
        assert (await bash(world, "cat note.txt")).text == "hello"
        await environment.delete(snapshot)

    use(body, folder=folder)
    assert not [*folder.iterdir()]


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="allow_code_execution=True"):
        InspectEnvironment("local")
    with pytest.raises(InputError, match="Inspect has no sandbox 'unknown'"):
        InspectEnvironment("unknown", allow_code_execution=True)
    with pytest.raises(WorldError, match="sandbox does not start"):
        use(lambda environment: environment.start(PROBLEM), Broken)


class Broken(LocalSandboxEnvironment):
    @classmethod
    async def sample_init(cls, *arguments: Any) -> Any:
        raise RuntimeError("no services started")


_running: contextvars.ContextVar[list[str]] = contextvars.ContextVar("running")
_configs: list[str | None] = []


class DockerSandboxEnvironment(LocalSandboxEnvironment):
    """Keeps its state as Inspect's docker provider does; a container is a directory."""

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        _running.set([])

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: Any) -> Any:
        sandbox = cls()
        _running.get().append(sandbox.directory.name)
        _configs.append(config)
        return {"default": sandbox}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: Any, interrupted: bool
    ) -> None:
        _running.get().remove(environments["default"].directory.name)
        await super().sample_cleanup(task_name, config, environments, interrupted)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        assert _running.get() == []

    async def connection(self, *, user: str | None = None) -> Any:
        from inspect_ai.util import SandboxConnection

        return SandboxConnection(type="docker", command="", container="container-7")


_prepared: list[str | None] = []


class Prepared(DockerSandboxEnvironment):
    """Notes the configurations that it prepares."""

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        _prepared.append(config)
        if len(_prepared) == 1:
            _running.set([])


def test_problems_have_dockerfiles_of_their_own(empty: Path) -> None:
    """Each is prepared once, and its worlds start from it."""
    _configs.clear()
    _prepared.clear()
    Prepared.__name__ = DockerSandboxEnvironment.__name__

    async def body(environment: InspectEnvironment) -> None:
        for name in ("a", "b", "a"):
            await environment.start(Problem(name, "", ""))

    use(body, Prepared, config=lambda problem: f"{problem.id}/Dockerfile")
    assert _configs == ["a/Dockerfile", "b/Dockerfile", "a/Dockerfile"]
    assert _prepared == ["a/Dockerfile", "b/Dockerfile"]
    with pytest.raises(InputError, match="except for docker"):
        InspectEnvironment("local", str, allow_code_execution=True)


def test_images_of_docker(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the calls are tested: that docker is asked for an image, which the fork starts from."""
    import yaml

    program = empty / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {empty}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    _configs.clear()

    async def body(environment: InspectEnvironment) -> str:
        world = await environment.start(PROBLEM)
        snapshot = await world.snapshot()
        restored = await asyncio.gather(*(environment.restore(snapshot) for _ in range(2)))
        compose = yaml.safe_load(Path(str(_configs[-1])).read_text())
        service = compose["services"]["default"]
        assert service["image"] == f"treegen-snapshot:{snapshot}"
        assert service["network_mode"] == "none"
        assert len(restored) == 2
        return snapshot

    snapshot = use(body, DockerSandboxEnvironment)
    assert snapshot.startswith("image-")
    assert (empty / "calls").read_text().splitlines() == [
        f"commit container-7 treegen-snapshot:{snapshot}",
        f"image rm treegen-snapshot:{snapshot}",
    ]
    program.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")

    async def fail(environment: InspectEnvironment) -> None:
        world = await environment.start(PROBLEM)
        with pytest.raises(WorldError, match="docker commit failed: no daemon"):
            await world.snapshot()

    use(fail, DockerSandboxEnvironment)
