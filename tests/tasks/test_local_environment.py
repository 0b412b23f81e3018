"""Worlds in the sandbox: tools, forks, limits, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fork_attacks import ATTACKS, FILES, attack_all, contents, python
from hostile_cases import (
    LIMITS,
    MIB,
    PATIENT,
    USABLE,
    left_since,
    load_cases,
    python_for_everybody,
    traces,
)
from worlds import call, use

from treegen.errors import CapacityError, InputError, StoppedError, WorldError
from treegen.evals.problem import Problem
from treegen.search.environments.protocol import Observation
from treegen.tasks.environments import directories, local, storage
from treegen.tasks.environments.directories import (
    copy_tree,
    measure_and_fix_modes,
    remove_tree,
)
from treegen.tasks.environments.local import LocalEnvironment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
    pytest.mark.usefixtures("only_judge"),
]

SMALL = replace(LIMITS, cpu_seconds=4.0, wall_seconds=8.0, files=60)
PROBLEM = Problem("p", "", "", metadata={"files": FILES})


def create(sandbox: str = USABLE[0] if USABLE else "none", **options: Any) -> LocalEnvironment:
    usual: dict[str, Any] = {"limits": SMALL, "num_workers": 4}
    return LocalEnvironment(allow_code_execution=True, sandbox=sandbox, **usual | options)


@pytest.mark.parametrize("sandbox", [*USABLE, "none"])
def test_tools(sandbox: str) -> None:
    async def body(environment: LocalEnvironment) -> None:
        world = await environment.start(PROBLEM)
        assert (await world.observe()).text == "note.txt\npack/\npack/tool.py"
        shown = await python(world, "from pack.tool import double\nprint(double(21))")
        assert shown == Observation(text="42", exit_status=0)
        shown = await call(world, "write_file", path="a/b/c.txt", text="\u00e9")
        assert shown.text == "Wrote 2 bytes to a/b/c.txt."
        shown = await python(
            world,
            """
            import os
            print(open("a/b/c.txt").read())
            os.rename("a/b/c.txt", "moved.txt"); os.rmdir("a/b"); os.rmdir("a")
            os.remove("note.txt")
            open("pack/tool.py", "a").write("# more\\n")
            """,
        )
        assert shown.text == "\u00e9"
        assert (await call(world, "list_files")).text == "moved.txt\npack/\npack/tool.py"
        assert "# more" in (await call(world, "read_file", path="pack/tool.py")).text
        shown = await python(world, "print('x')\n1 / 0")
        assert shown.exit_status == 1 and not shown.failure
        assert shown.text.startswith("x\nTraceback") and shown.text.endswith("[exit status 1]")
        assert "SyntaxError" in (await python(world, "def f(:")).text
        shown = await python(world, "print('y' * 40000)")
        assert len(shown.text) < 16_100 and "24,000 characters left out" in shown.text

    use(create(sandbox), body)


@pytest.fixture(name="plain", scope="module")
def _plain(only_judge: None) -> Iterator[LocalEnvironment]:
    environment = create("none")
    yield environment
    asyncio.run(environment.close())


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        ("bash", {"command": "ls"}, "there is no tool 'bash'; use python, read_file"),
        ("python", {}, "python takes code; got none"),
        ("python", {"code": "1", "timeout": 5}, "python takes code; got code, timeout"),
        ("python", {"code": 1}, "code must be a string, got int"),
        ("read_file", {"path": "missing"}, "'missing' does not exist"),
        ("read_file", {"path": "pack"}, "'pack' is a directory"),
        ("read_file", {"path": "note.txt/x"}, "has a part that is not a directory"),
        ("read_file", {"path": "/etc/passwd"}, "leads out of the working directory"),
        ("read_file", {"path": "../../x"}, "leads out of the working directory"),
        ("read_file", {"path": "a\0b"}, "no file can have the name"),
        ("read_file", {"path": "a\ud800"}, "no file can have the name"),
        ("read_file", {"path": "a" * 300}, "is too long for a path"),
        ("write_file", {"path": "pack", "text": ""}, "is a directory"),
        ("write_file", {"path": "new/", "text": ""}, "is a directory"),
        ("write_file", {"path": "/tmp/x", "text": ""}, "leads out of the working directory"),
        ("write_file", {"path": "a/../../x", "text": ""}, "leads out of the working directory"),
        ("write_file", {"path": "big", "text": "x" * (MIB + 1)}, "may have 60 files and 1,048,576"),
        ("write_file", {"path": "d/" * 70 + "x", "text": ""}, "may have 60 files"),
        ("write_file", {"path": "d/" * 40 + "x", "text": ""}, "may have 32 parts"),
    ],
)
def test_a_wrong_call_is_an_observation(
    plain: LocalEnvironment, tool: str, arguments: Any, error: str
) -> None:
    async def body() -> None:
        world = await plain.start(PROBLEM)
        before = contents(world)
        shown = await call(world, tool, **arguments)
        assert shown.text.startswith("Error: ") and error in shown.text
        assert not shown.failure
        if "a/../.." not in str(arguments):  # it has created a/
            assert contents(world) == before
        await world.close()

    asyncio.run(body())


@pytest.fixture(scope="module", params=USABLE)
def forks(
    only_judge: None, request: pytest.FixtureRequest
) -> Iterator[dict[str, tuple[str, bool]]]:
    """What each attack printed, and whether its sibling and the snapshot are as they were."""
    before = traces()
    yield use(create(request.param), attack_all)
    assert left_since(before) == set()


@pytest.mark.parametrize("name", list(ATTACKS))
def test_forks_do_not_reach_each_other(forks: dict[str, tuple[str, bool]], name: str) -> None:
    text, whole = forks[name]
    assert "ESCAPED" not in text
    assert whole


UNPRIVILEGED = """
import asyncio, json, os, sys
os.setgroups([])
os.setresgid(65432, 65432, 65432)
os.setresuid(65432, 65432, 65432)
sys.path[:0] = [sys.argv[1]]
from fork_attacks import attack_all
from treegen.tasks.environments.local import LocalEnvironment

async def main():
    environment = LocalEnvironment(allow_code_execution=True, sandbox=sys.argv[2])
    shown = await attack_all(environment)
    await environment.close()
    return shown

print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("sandbox", USABLE)
def test_forks_of_an_unprivileged_user(sandbox: str, repository: Path) -> None:
    interpreter = python_for_everybody()
    folder = Path(tempfile.mkdtemp(prefix="environment-tests-"))
    try:
        for name in ("errors.py", "common", "search/environments", "prompts/replies/types.py"):
            copy(repository / "treegen" / name, folder / "treegen" / name)
        for name in ("sandbox", "environments"):
            copy(repository / "tasks" / name, folder / "treegen" / "tasks" / name)
        for name in ("fork_attacks.py", "worlds.py"):
            copy(repository / "tests" / name, folder / name)
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        done = subprocess.run(
            [interpreter, "-c", UNPRIVILEGED, str(folder), sandbox],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
        )
    finally:
        shutil.rmtree(folder)
    if "no sandbox works here" in done.stderr and sandbox == "bubblewrap":
        pytest.skip("user namespaces are switched off here")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert set(shown) == set(ATTACKS)
    assert [name for name, (text, whole) in shown.items() if "ESCAPED" in text or not whole] == []


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder, and create the folders above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def test_a_link_in_a_directory_leads_nowhere_for_the_tools(tmp_path: Path) -> None:
    """An unconfined program can plant anything; reading, writing and copying stay inside."""
    secret = tmp_path / "secret"
    secret.write_text("token")

    async def body(environment: LocalEnvironment) -> None:
        world = await environment.start(PROBLEM)
        root = Path(world.workspace.path)
        (root / "link").symlink_to(secret)
        (root / "folder").symlink_to(tmp_path)
        (root / "loop").symlink_to("loop")
        (root / "inner").symlink_to("pack/tool.py")
        os.link(secret, root / "hard")
        os.link(root / "note.txt", root / "same.txt")
        os.mkfifo(root / "pipe")
        (root / "\udcff\n").write_text("x")
        with (root / "sparse").open("w") as file:
            file.truncate(900_000)
        for path in ("link", "folder/secret", "loop", "pipe", "/dev/zero"):
            assert (await call(world, "read_file", path=path)).text.startswith("Error: ")
        assert "double" in (await call(world, "read_file", path="inner")).text
        for path in ("link", "hard"):
            assert "Wrote" in (await call(world, "write_file", path=path, text="mine")).text
        assert "Error" in (await call(world, "write_file", path="folder/secret", text="x")).text
        assert secret.read_text() == "token" and [*tmp_path.iterdir()] == [secret]
        assert "\\udcff" in (await world.observe()).text
        (root / "link2").symlink_to(secret)
        restored = await environment.restore(await world.snapshot())
        (root / "pipe").unlink()
        assert contents(restored) == contents(world)

    use(create("none"), body)


@pytest.mark.parametrize("sandbox", USABLE)
def test_restored_files_equal_the_originals(sandbox: str) -> None:
    async def body(environment: LocalEnvironment) -> None:
        world = await environment.start(PROBLEM)
        source = """
            import os
            for mode in (0o700, 0o600, 0o400, 0o000, 0o4755, 0o644):
                os.umask(0)
                os.close(os.open(f"file{mode:o}", os.O_CREAT | os.O_WRONLY, mode))
            os.mkdir("open", 0o777)
            os.mkdir("sealed", 0o500)
            os.symlink("nowhere", "open/dangling")
            os.symlink("../note.txt", "open/link")
            open(b"\\xff\\xfe name", "w").write("x")
            open("-rf *", "w").write("")
            open("hole", "wb").truncate(500_000)
        """
        assert (await python(world, source)).text == "[no output]"
        snapshot = await world.snapshot()
        restored = await environment.restore(snapshot)
        assert contents(restored) == contents(world)
        assert contents(world)["file4755"][1] == 0o755
        assert contents(world)["file0"][1] == 0o400
        shown = await python(restored, "import os; os.rmdir('sealed'); os.remove('file0')")
        assert shown.exit_status == 0
        assert contents(restored) != contents(world)
        assert contents(await environment.restore(snapshot)) == contents(world)

    use(create(sandbox), body)


ENDED = {
    "endless": ("while True: pass", "time"),
    "waiting": ("import time\nwhile True: time.sleep(1)", "time"),
    "full_disk": (
        "i = 0\nwhile True:\n  open(f'{i % 50}', 'ab').write(b'x' * 65536); i += 1",
        "scratch",
    ),
    "many_files": ("i = 0\nwhile True:\n  open(f'{i}', 'w'); i += 1", "scratch"),
    "quick_files": ("for i in range(61): open(f'{i}', 'w').close()", ""),
    "deep": ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", "scratch"),
    "hidden": ("import os\nos.mkdir('d', 0o300)\nos.chdir('d')\nopen('x', 'w')", ""),
    "output": ("while True: print('x' * 1000)", "bytes"),
}


@pytest.mark.parametrize("sandbox", USABLE)
def test_a_limit_ends_its_own_branch_only(sandbox: str) -> None:
    limits = replace(SMALL, cpu_seconds=1.0, wall_seconds=6.0)

    async def body(environment: LocalEnvironment) -> None:
        snapshot = await (await environment.start(PROBLEM)).snapshot()
        sibling = await environment.restore(snapshot)

        async def end(source: str, reason: str) -> None:
            world = await environment.restore(snapshot)
            shown = await python(world, source)
            assert shown.failure and reason in shown.failure, shown
            assert await call(world, "list_files") == Observation(failure=shown.failure)
            with pytest.raises(WorldError, match="failed"):
                await world.snapshot()
            await world.close()
            assert not os.path.exists(world.workspace.path)

        await asyncio.gather(*(end(*case) for case in ENDED.values()))
        # The sandbox refuses to fork, which is no limit: the program goes on.
        shown = await python(sibling, "import os\nwhile True: os.fork()")
        assert "PermissionError" in shown.text and not shown.failure
        assert (await python(sibling, "print(open('note.txt').read())")).text == "hello"

    use(create(sandbox, limits=limits), body)


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()


@pytest.mark.parametrize("sandbox", USABLE)
def test_hostile_programs_do_not_get_out(sandbox: str) -> None:
    """Verdicts are as in the judge; honest programs need input, which a world has none of."""
    before = traces()
    cases = {
        name: case
        for name, case in load_cases().items()
        if case.program.fn_name is None and not name.startswith(("honest_", "output_just"))
    }
    assert len(cases) > 80
    outcomes = (
        {"timeout", "output_limit"},
        {"runtime_error", "memory_limit", "compile_error"},
        {"accepted", "wrong_answer"},
    )

    async def body(environment: LocalEnvironment, names: list[str]) -> dict[str, Observation]:
        shown: dict[str, Observation] = {}

        async def run(names: list[str]) -> None:
            """Run programs in one empty world, and in another one once the first has failed."""
            world = None
            for name in names:
                world = world or await environment.start(Problem("p", "", ""))
                shown[name] = await python(world, cases[name].program.source)
                if shown[name].failure:
                    await world.close()
                    world = None
                else:
                    empty(Path(world.workspace.path))

        await asyncio.gather(*(run(names[at::8]) for at in range(8)))
        return shown

    # A busy machine takes long to hand out memory.
    greedy = [name for name, case in cases.items() if case.expect == {"memory_limit"}]
    others = [name for name in cases if name not in greedy]
    patient = create(sandbox, limits=PATIENT, num_workers=8)
    shown = use(patient, lambda environment: body(environment, greedy))
    limits = replace(LIMITS, wall_seconds=6.0)
    hasty = create(sandbox, limits=limits, num_workers=8)  # most of them wait
    shown |= use(hasty, lambda environment: body(environment, others))
    for name, observation in shown.items():
        outcome = outcomes[0 if observation.failure else 1 if observation.exit_status else 2]
        assert outcome & cases[name].expect, (name, observation)
    assert left_since(before) == set()


def test_snapshots_have_a_quota(tmp_path: Path) -> None:
    async def body(environment: LocalEnvironment) -> None:
        world = await environment.start(PROBLEM)
        await call(world, "write_file", path="big", text="x" * 400_000)
        first = await world.snapshot()
        await world.snapshot()
        with pytest.raises(
            CapacityError, match=r"2 stored snapshots leave .* raise max_snapshot_bytes"
        ):
            await world.snapshot()
        await environment.delete(first)
        await environment.delete(first)
        await environment.delete("../worlds")
        third = await world.snapshot()
        for unknown in (first, "..", "../worlds", "", "a\0"):
            with pytest.raises(InputError, match="no snapshot"):
                await environment.restore(unknown)
        assert len([*(tmp_path / "w" / "snapshots").iterdir()]) == 2
        assert contents(await environment.restore(third)) == contents(world)

    use(create("none", folder=tmp_path / "w", max_snapshot_bytes=MIB), body)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_snapshot_that_goes_while_it_is_restored_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    async def body(environment: LocalEnvironment) -> None:
        snapshot = await (await environment.start(PROBLEM)).snapshot()

        def copy_late(source: int, *args: Any) -> None:
            if is_deleted:
                environment._storage.delete(snapshot)
                copy_tree(source, *args)  # a part of the snapshot
            else:
                remove_tree(tmp_path / "w" / "snapshots" / snapshot)
                raise FileNotFoundError(snapshot)

        monkeypatch.setattr(storage, "copy_tree", copy_late)
        for _ in range(2):
            with pytest.raises(InputError, match="no snapshot"):
                await environment.restore(snapshot)
        assert len([*(tmp_path / "w" / "worlds").iterdir()]) == 1

    use(create("none", folder=tmp_path / "w"), body)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="allow_code_execution=True"):
        LocalEnvironment()
    with pytest.raises(InputError, match="num_workers must be at least 1"):
        create("none", num_workers=0)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InputError, match="contains files that treegen did not create"):
        create("none", folder=tmp_path)
    with pytest.raises(InputError, match="No such file"):
        create("none", folder=tmp_path / "a" / "b")
    with pytest.raises(InputError, match="Not a directory"):
        create("none", folder=tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    async def body(environment: LocalEnvironment) -> None:
        many = {f"{i}": "" for i in range(61)}
        deep = {f"{i}/{i}/{i}/x": "" for i in range(20)}
        too_large = ({"big": "x" * 2 * MIB}, many, deep, {"d/" * 40 + "x": ""})
        for files in (*too_large, {"../x": "y"}, tmp_path / "missing", {"": "x"}):
            with pytest.raises(InputError, match="the first files of a problem "):
                await environment.start(Problem("p", "", "", metadata={"files": files}))
        world = await environment.start(Problem("p", "", "", metadata={"files": tmp_path}))
        assert (await world.observe()).text == "mine"
        await world.close()
        await world.close()
        with pytest.raises(StoppedError, match="the world is closed"):
            await call(world, "list_files")

    environment = create("none")
    use(environment, body)
    with pytest.raises(StoppedError, match="environment is closed"):
        asyncio.run(environment.start(PROBLEM))


def test_the_directory_is_not_measured_for_each_of_the_first_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []

    def measure(folder: int, max_size: Any) -> Any:
        measured.append(folder)
        return measure_and_fix_modes(folder, max_size)

    monkeypatch.setattr(local, "measure_and_fix_modes", measure)

    async def body(environment: LocalEnvironment) -> None:
        files = {f"d/{i}": f"{i}" for i in range(50)}
        world = await environment.start(Problem("p", "", "", metadata={"files": files}))
        assert len(measured) == 1
        assert sorted(await world.list_files()) == sorted(["d/", *files])

    use(create("none"), body)


def test_a_cancelled_action_ends_at_once() -> None:
    async def body(environment: LocalEnvironment) -> None:
        world = await environment.start(PROBLEM)
        await python(world, "")
        task = asyncio.ensure_future(python(world, "import time\ntime.sleep(100)"))
        await asyncio.sleep(0.3)
        task.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        await world.close()
        assert time.monotonic() - started < 20

    use(create(limits=replace(SMALL, wall_seconds=100.0)), body)


KILLED = """
    import asyncio, sys, time
    from treegen.evals.problem import Problem
    from treegen.prompts.replies.types import ToolCall
    from treegen.tasks.environments.local import LocalEnvironment

    async def main():
        options = {"sandbox": sys.argv[1], "folder": sys.argv[2] or None}
        environment = LocalEnvironment(allow_code_execution=True, **options)
        world = await environment.start(Problem("p", "", "", metadata={"files": {"a": "1"}}))
        snapshot = await world.snapshot()
        program = "import os\\nfor _ in range(20): os.mkdir('d', 0); break\\nwhile True: pass"
        task = asyncio.ensure_future(world.run(ToolCall("python", {"code": program})))
        await asyncio.sleep(0.5)
        print(snapshot, flush=True)
        await task

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("sandbox", "is_named"),
    [
        pytest.param(name, is_named, marks=[pytest.mark.soak] * (is_named != (name == USABLE[-1])))
        for name in USABLE
        for is_named in (False, True)
    ],
)
def test_a_killed_process_leaves_directories_that_the_next_removes(
    sandbox: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    folder = tmp_path / "mine"
    # What looks like treegen's and is not, and what belongs to a process that lives.
    strange = tmp_path / f"{storage._NAME}strange"
    strange.mkdir()
    (strange / "file").write_text("x")
    (tmp_path / f"{storage._NAME}link").symlink_to(strange)
    living = create("none")
    before = {path.name for path in tmp_path.iterdir()}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), sandbox, str(folder) * is_named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        snapshot = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
    left = {path.name for path in tmp_path.iterdir()} - before
    assert len(left) == 1 and snapshot

    async def body(environment: LocalEnvironment) -> None:
        if not is_named:
            with pytest.raises(InputError, match="no snapshot"):
                await environment.restore(snapshot)
            return
        assert not [*(folder / "worlds").iterdir()]
        world = await environment.restore(snapshot)
        assert (await call(world, "read_file", path="a")).text == "1"
        with pytest.raises(InputError, match="another process uses this folder"):
            create("none", folder=folder)

    use(create("none", folder=folder if is_named else None), body)
    assert {path.name for path in tmp_path.iterdir()} == before | ({"mine"} if is_named else set())
    assert (strange / "file").read_text() == "x"
    if is_named:  # the snapshot of the killed process stays until it is deleted
        use(create("none", folder=folder), lambda environment: environment.delete(snapshot))
        assert {path.name for path in folder.iterdir()} == set()
    use(living, lambda environment: environment.start(PROBLEM))


def test_any_tree_can_be_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(top)
        for _ in range(1200):  # deeper than Python recurses, and than a path is long
            os.mkdir("d" * 200)
            Path("f").write_text("x")
            os.chdir("d" * 200)
    finally:
        os.fchdir(here)
        os.close(here)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (top / "link").symlink_to(kept)
    directories.remove_tree(top)
    directories.remove_tree(top)
    assert not top.exists()
    assert (kept / "file").read_text() == "x"


def test_describe_lists_the_sandbox_and_its_gaps() -> None:
    environment = create()
    lines = environment.describe()
    use(environment, lambda environment: environment.delete(""))
    assert lines[0] == f"sandbox: {USABLE[0]}"
    assert {"read_host_file", "write_host_file", "fork"} <= set(environment.report.held)
    assert any(line.startswith("not protected: disk space of a working") for line in lines)
    assert lines[-1].startswith("forks: ") and "processes end" in lines[-1]


ODD: dict[str, Callable[[Path], object]] = {
    "a file for the worlds": lambda at: (at / "worlds").write_text("x"),
    "a file for the snapshots": lambda at: (at / "snapshots").write_text("x"),
    "a folder for the marker": lambda at: _replace(at / ".treegen-worlds"),
    "a pipe for the worlds": lambda at: os.mkfifo(at / "worlds"),
    "a file in the worlds": lambda at: _fill(at / "worlds", "note.txt"),
    "a file in the snapshots": lambda at: _fill(at / "snapshots", "0123456789abcdef"),
    "a partial file": lambda at: _fill(at / "snapshots", "photos.partial"),
    "somebody's folder": lambda at: (at / "snapshots" / "photos").mkdir(parents=True),
    "a link in the snapshots": lambda at: _link(at / "snapshots", at),
    "a name that is not UTF-8": lambda at: (at / "worlds" / "\udcff").mkdir(parents=True),
    "a snapshot that cannot be listed": lambda at: _seal(at / "snapshots"),
}


def _replace(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(folder: Path, target: Path) -> None:
    folder.mkdir()
    (folder / "0123456789abcdef").symlink_to(target)


def _seal(folder: Path) -> None:
    inner = folder / "0123456789abcdef" / "sub"
    inner.mkdir(parents=True)
    inner.chmod(0)


def _fill(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_text("x")


@pytest.mark.parametrize("odd", ODD)
def test_odd_entries_in_a_folder_of_worlds_are_named(tmp_path: Path, odd: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".treegen-worlds").touch()
    ODD[odd](folder)
    before = {path: path.lstat().st_mode for path in folder.rglob("*")}
    with pytest.raises(InputError, match=r"/folder/.*(; remove |move this entry out)") as error:
        create("none", folder=folder)
    assert str(error.value).isprintable() and str(error.value).encode()
    left = {path: path.lstat().st_mode for path in folder.rglob("*")}
    assert {path: mode for path, mode in left.items() if path in before} == before
    assert before.keys() <= left.keys()


def test_snapshots_stay_for_the_next_process(tmp_path: Path) -> None:
    async def leave(environment: LocalEnvironment) -> list[str]:
        world = await environment.start(PROBLEM)
        names = [await world.snapshot() for _ in range(3)]
        await environment.close(names[:2])
        return names

    names = use(create("none", folder=tmp_path / "w"), leave)
    assert sorted(path.name for path in (tmp_path / "w" / "snapshots").iterdir()) == sorted(
        names[:2]
    )

    async def body(environment: LocalEnvironment) -> None:
        assert await environment.remove_leftovers(names[:1]) == 1
        world = await environment.restore(names[0])
        assert (await call(world, "read_file", path="note.txt")).text == "hello\n"
        own = await world.snapshot()
        assert await environment.remove_leftovers() == 1
        await environment.restore(own)

    use(create("none", folder=tmp_path / "w"), body)
    assert not [*(tmp_path / "w").iterdir()]


def test_a_world_that_cannot_be_removed_leaves_the_rest_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(environment: LocalEnvironment) -> None:
        worlds = [await environment.start(PROBLEM) for _ in range(3)]
        broken = worlds[1].workspace.path

        def remove(path: str | os.PathLike[str]) -> None:
            if path == broken:
                raise OSError("the disk failed")
            remove_tree(path)

        with monkeypatch.context() as patch:
            patch.setattr(local, "remove_tree", remove)
            with pytest.raises(WorldError, match="the disk failed"):
                await environment.close()

    use(create("none", folder=tmp_path / "w"), body)
    use(create("none", folder=tmp_path / "w"), body)  # the folder is not locked any more
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("name", ["worlds", "snapshots"])
def test_links_in_a_folder_of_worlds_are_not_followed(tmp_path: Path, name: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    (victim / "photos.partial").mkdir(parents=True)
    make = partial(LocalEnvironment, allow_code_execution=True, folder=folder)
    asyncio.run(make().close())
    shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    (folder / ".treegen-worlds").touch()
    (folder / name).symlink_to(victim)
    with pytest.raises(InputError, match="is a symbolic link"):
        make()
    assert (victim / "photos.partial").is_dir()
