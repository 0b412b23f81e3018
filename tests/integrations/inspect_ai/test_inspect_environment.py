"""Worlds in sandboxes of Inspect. Docker does not run in the tests: a stand-in takes its calls."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import worlds
from worlds import bash, call

from treegen.errors import CapacityError, InputError, StoppedError, WorldError
from treegen.evals.problem import Problem
from treegen.search.environments.protocol import Observation

pytest.importorskip("inspect_ai")
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from treegen.integrations.inspect_ai import environment as sandboxes
from treegen.integrations.inspect_ai.environment import InspectEnvironment

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("frozen_objects"),
]
T = TypeVar("T")
PROBLEM = Problem(
    "p", "", "", metadata={"files": {"note.txt": "hello\n", "pack/a b.py": "x = 1\n"}}
)


def use(
    body: Callable[[InspectEnvironment], Awaitable[T]], sandbox: Any = "local", **options: Any
) -> T:
    """Run a coroutine with an environment, and close it."""
    try:
        return worlds.use(InspectEnvironment(sandbox, allow_code_execution=True, **options), body)
    finally:
        gc.collect()  # of pipes to commands that Inspect ended and left open


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


def test_files_that_cannot_be_listed_are_not_no_files(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(environment: InspectEnvironment) -> None:
        world = await environment.start(PROBLEM)
        monkeypatch.setattr(sandboxes, "_LIST_COMMAND", "echo find: not found >&2; exit 127")
        with pytest.raises(WorldError, match="find failed in a sandbox: find: not found"):
            await world.observe()

    use(body)


def test_an_error_of_the_files_leaves_no_sandbox(empty: Path) -> None:
    def files(problem: Any) -> Any:
        raise KeyError("files")

    async def body(environment: InspectEnvironment) -> None:
        with pytest.raises(KeyError):
            await environment.start(PROBLEM)
        assert not environment._worlds

    use(body, files=files)


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
        assert shown[0].failure == "more than 4 s"
        assert shown[1].failure in ("more than 4 s", "too much output")
        assert shown[2] == Observation(text="hello", exit_status=0)
        assert await bash(worlds[0], "true") == Observation(failure="more than 4 s")

    use(body, command_seconds=4.0)


def test_archives_have_a_quota_and_survive_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "archives"

    async def leave(environment: InspectEnvironment) -> str:
        world = await environment.start(PROBLEM)
        snapshot = await world.snapshot()
        await bash(world, "head -c 300000 /dev/urandom > big")
        with pytest.raises(CapacityError, match="raise max_snapshot_bytes"):
            await world.snapshot()
        environment._created.clear()  # as if the process had been killed
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
    with pytest.raises(InputError, match="the Inspect sandbox 'unknown' was not found"):
        InspectEnvironment("unknown", allow_code_execution=True)
    with pytest.raises(WorldError, match="sandbox failed to start"):
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
    with pytest.raises(InputError, match="only with the docker sandbox"):
        InspectEnvironment("local", str, allow_code_execution=True)


DOCKER = """#!{python}
import json, os, sys
from pathlib import Path
here = Path(__file__).parent.parent
state = json.loads((here / "state").read_text())  # images: [tag, label]; containers: [name, label]
words = sys.argv[1:]
with (here / "calls").open("a") as file:
    print(*words, file=file)
label = next((word[15:] for word in words if word.startswith("--filter=label=")), "")
match words[:2]:
    case [command, *_] if command == state.get("fails"):
        sys.exit("no daemon")
    case ["container", "inspect"]:
        print(state["size"])
    case ["commit", change]:
        state["images"].append([words[-1].split(":")[1], change[len("--change=LABEL "):]])
    case ["image", "ls"]:
        print(*[tag for tag, of in state["images"] if of == label], sep="\\n")
    case ["image", "rm"]:
        assert "--force" in words  # a container may run it
        state["images"] = [each for each in state["images"] if each[0] != words[-1].split(":")[1]]
    case ["image", "prune"]:
        assert label and "--force" in words
    case ["ps", "--all"]:
        print(*[name for name, of in state["containers"] if of == label], sep="\\n")
    case ["rm", "--force"]:
        state["containers"] = [each for each in state["containers"] if each[0] not in words]
    case _:
        sys.exit(f"unknown: {{words}}")
new = here / f"state.{{os.getpid()}}"  # another command may read the state meanwhile
new.write_text(json.dumps(state))
new.rename(here / "state")
"""


@pytest.fixture
def docker(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A stand-in for docker; the function changes its state and returns it."""
    folder = empty / "docker"
    program = folder / "bin" / "docker"
    program.parent.mkdir(parents=True)
    program.write_text(DOCKER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    _configs.clear()

    def change(**more: Any) -> dict[str, Any]:
        path = folder / "state"
        state = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(state := state | more))
        return state

    change(images=[], containers=[], size=1000)
    return change


def test_images_of_docker(empty: Path, docker: Callable[..., dict[str, Any]]) -> None:
    """Only the calls are tested: that docker is asked for an image, which the fork starts from."""
    import yaml

    async def body(environment: InspectEnvironment) -> str:
        world = await environment.start(PROBLEM)
        snapshot = await world.snapshot()
        restored = await asyncio.gather(*(environment.restore(snapshot) for _ in range(2)))
        compose = yaml.safe_load(Path(str(_configs[-1])).read_text())
        service = compose["services"]["default"]
        assert service["image"] == f"treegen-snapshot:{snapshot}"
        assert service["network_mode"] == "none"
        assert len(restored) == 2
        with pytest.raises(CapacityError, match=r"needs 1,000 bytes, .* raise max_snapshot_bytes"):
            await world.snapshot()
        assert len(docker()["images"]) == 1
        return snapshot

    snapshot = use(body, DockerSandboxEnvironment, max_snapshot_bytes=1500)
    assert snapshot.startswith("image-")
    assert docker()["images"] == []
    calls = (empty / "docker" / "calls").read_text().splitlines()
    assert calls[0] == "container inspect --size --format={{.SizeRw}} container-7"
    assert calls[1].startswith("commit --change=LABEL treegen.run=")
    assert calls[1].endswith(f" container-7 treegen-snapshot:{snapshot}")
    assert calls[-2] == f"image rm --force treegen-snapshot:{snapshot}"
    assert calls[-1].startswith("image prune --force --filter=label=treegen.run=")
    docker(fails="commit")

    async def fail(environment: InspectEnvironment) -> None:
        world = await environment.start(PROBLEM)
        with pytest.raises(WorldError, match="docker commit failed: no daemon"):
            await world.snapshot()
        docker(fails="", size="<no value>")
        with pytest.raises(WorldError, match="docker to print the size of a container"):
            await world.snapshot()

    use(fail, DockerSandboxEnvironment)


def test_images_of_a_killed_run_are_found_by_their_label(
    empty: Path, docker: Callable[..., dict[str, Any]]
) -> None:
    folder, other = empty / "worlds", [["image-of-others", "treegen.run=0"]]
    docker(images=other)

    async def leave(environment: InspectEnvironment) -> list[str]:
        world = await environment.start(PROBLEM)
        names = [await world.snapshot() for _ in range(3)]
        environment._created.clear()  # as if the process had been killed
        return names

    first, second, third = use(leave, DockerSandboxEnvironment, folder=folder)
    label = docker()["images"][-1][1]
    docker(containers=[["ours-1", label], ["theirs-1", "treegen.run=0"], ["container-7", label]])

    async def body(environment: InspectEnvironment) -> None:
        for _ in range(2):
            with pytest.raises(CapacityError):  # those of the killed process count
                await (await environment.start(PROBLEM)).snapshot()
        assert await environment.remove_leftovers([first, second]) == 2  # ours-1 and third
        assert [name for name, _ in docker()["containers"]] == ["theirs-1", "container-7"]
        await environment.restore(first)
        with pytest.raises(InputError, match="there is no snapshot"):
            await environment.restore(third)
        docker(images=[each for each in docker()["images"] if each[0] != second])
        with pytest.raises(InputError, match="there is no snapshot"):
            await environment.restore(second)
        compose = folder / first
        compose.write_text(compose.read_text() + "    volumes: ['/:/host']\n")
        with pytest.raises(
            InputError, match="was changed after treegen wrote the file; remove the file"
        ):
            await environment.restore(first)
        for snapshot in (first, second):
            await environment.delete(snapshot)
        kept = await (await environment.start(PROBLEM)).snapshot()
        await environment.close([kept])

    use(body, DockerSandboxEnvironment, folder=folder, max_snapshot_bytes=3500)
    assert len(docker()["images"]) == 2 and len([*folder.iterdir()]) == 1

    async def end(environment: InspectEnvironment) -> None:
        assert await environment.remove_leftovers() == 2  # the image, and container-7

    use(end, DockerSandboxEnvironment, folder=folder)
    assert docker()["images"] == other and not [*folder.iterdir()]


@pytest.mark.parametrize("name", ["note.txt", "archive-0123456789abcdef", "image-0123456789abcdef"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_odd_entries_in_a_folder_of_snapshots_are_named(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / "w" / name
    path.parent.mkdir()
    make: dict[str, Callable[[], object]] = {
        "file": lambda: path.write_text("x"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    if kind == "file" and name.startswith("archive"):
        use(lambda environment: environment.remove_leftovers([name]), folder=path.parent)
    else:
        with pytest.raises(InputError, match=name):
            use(lambda environment: environment.start(PROBLEM), folder=path.parent)
    assert path.exists()
    with pytest.raises(InputError, match=r"cannot store snapshots in .*; choose another folder"):
        use(lambda environment: environment.start(PROBLEM), folder="/dev/null/x")


def test_a_world_that_cannot_be_closed_is_tried_again(empty: Path) -> None:
    class Stubborn(LocalSandboxEnvironment):
        num_tries = 0

        @classmethod
        async def sample_cleanup(cls, *arguments: Any) -> None:
            cls.num_tries += 1
            if cls.num_tries == 1:
                raise OSError("busy")
            await super().sample_cleanup(*arguments)

    async def body(environment: InspectEnvironment) -> None:
        world = await environment.start(PROBLEM)
        with pytest.raises(OSError, match="busy"):
            await world.close()
        with pytest.raises(StoppedError, match="world is closed"):
            await bash(world, "true")

    use(body, Stubborn)
    assert Stubborn.num_tries == 2 and not [*empty.iterdir()]
