"""Worlds in sandboxes of a server with E2B's interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pytest
import worlds
from e2b_cases import KEY, Cloud, serving
from worlds import bash, call

from treegen.errors import InputError, StoppedError, WorldError
from treegen.evals.problem import Problem
from treegen.integrations import e2b, e2b_server
from treegen.integrations.e2b import E2BEnvironment
from treegen.integrations.e2b_server import MissingError
from treegen.search.environments.protocol import Observation

T = TypeVar("T")
FILES = {"note.txt": "hello\n", "pack/tool.py": "x = 1\n"}
PROBLEM = Problem("p", "", "", metadata={"files": FILES})


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with serving(tmp_path) as cloud:
        for name, value in (("KEY", KEY), ("URL", cloud.url)):
            monkeypatch.setenv(f"E2B_API_{name}", value)
        monkeypatch.setenv("E2B_SANDBOX_URL", cloud.url)
        yield cloud


def use(body: Callable[[E2BEnvironment], Awaitable[T]], **options: Any) -> T:
    return worlds.use(E2BEnvironment(allow_code_execution=True, **options), body)


def test_tools(cloud: Cloud) -> None:
    async def body(environment: E2BEnvironment) -> None:
        world = await environment.start(PROBLEM)
        (sandbox,) = cloud.sandboxes.values()
        assert sandbox.body["allow_internet_access"] is False
        assert sandbox.body["timeout"] == 600
        assert (await world.observe()).text == "note.txt\npack/\npack/tool.py"
        shown = await bash(world, "cat note.txt; echo more > 'new file'; echo oops >&2")
        assert shown == Observation(text="hello\noops", exit_status=0)
        assert (await call(world, "read_file", path="new file")).text == "more\n"
        shown = await call(world, "write_file", path="a/b/\u00e9 &?.txt", text="\u00e9")
        assert shown.text.startswith("Wrote 2 bytes")
        assert (await bash(world, "cat a/b/*")).text == "\u00e9"
        assert (await bash(world, "exit 3")).exit_status == 3
        assert (await bash(world, "kill -9 $$")).exit_status == -1
        assert (await bash(world, "true")).text == "[no output]"
        assert "does not exist" in (await call(world, "read_file", path="missing")).text
        assert "is a directory" in (await call(world, "read_file", path="pack")).text
        assert "is a directory" in (await call(world, "write_file", path="pack", text="")).text
        assert "no file can" in (await call(world, "read_file", path="a\0")).text

    use(body)
    assert cloud.sandboxes == {}


def test_long_texts_are_cut_at_any_limit(cloud: Cloud) -> None:
    async def body(environment: E2BEnvironment) -> None:
        shown = await bash(await environment.start(PROBLEM), "echo hello")
        assert shown.text == "\n[... 5 characters left out ...]\n"

    use(body, max_chars=1)


def test_a_world_that_gets_no_directory_is_closed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(environment: E2BEnvironment) -> None:
        cloud.endless, cloud.drip = "/filesystem.Filesystem/MakeDir", 0.2
        monkeypatch.setattr(e2b_server, "_ANSWER_SECONDS", 0.5)
        with pytest.raises(WorldError, match="did not finish its response"):
            await environment.start(PROBLEM)
        assert not cloud.sandboxes and not environment.worlds

    use(body)


def test_an_error_of_the_files_leaves_no_sandbox(cloud: Cloud) -> None:
    def files(problem: Any) -> Any:
        raise KeyError("files")

    async def body(environment: E2BEnvironment) -> None:
        with pytest.raises(KeyError):
            await environment.start(PROBLEM)
        assert not cloud.sandboxes and not environment.worlds

    use(body, files=files)


def test_forks_and_snapshots(cloud: Cloud) -> None:
    async def body(environment: E2BEnvironment) -> None:
        first = await environment.start(PROBLEM)
        await bash(first, "echo token > secret; ln -s note.txt link; chmod 755 note.txt")
        snapshot = await first.snapshot()
        await bash(first, "rm secret")
        left, right = [await environment.restore(snapshot) for _ in range(2)]
        await bash(left, "echo left > secret")
        shown = await bash(right, "cat secret link; stat -c %a note.txt")
        assert shown.text == "token\nhello\n755"
        copy = await left.snapshot()
        third, fourth = [await environment.restore(copy) for _ in range(2)]
        await bash(third, "echo third > secret")
        assert (await bash(fourth, "cat secret")).text == "left"
        assert (await bash(left, "cat secret")).text == "left"
        assert len(cloud.sandboxes) == 5
        await environment.delete(snapshot)
        await environment.delete(snapshot)
        with pytest.raises(InputError, match="there is no snapshot"):
            await environment.restore(snapshot)
        await fourth.snapshot()
        await fourth.close()
        await fourth.close()
        with pytest.raises(StoppedError, match="world is closed"):
            await bash(fourth, "true")

    use(body)
    assert cloud.sandboxes == {}
    assert list(cloud.templates) == ["base"]


def test_a_limit_ends_its_own_branch_only(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2b_server, "_MAX_OUTPUT_BYTES", 100_000)

    async def body(environment: E2BEnvironment) -> None:
        worlds = [await environment.start(PROBLEM) for _ in range(3)]
        shown = await asyncio.gather(
            bash(worlds[0], "sleep 100"), bash(worlds[1], "yes"), bash(worlds[2], "seq 100000")
        )
        assert "more than 3 s" in shown[0].failure
        assert "more than 100,000 bytes" in shown[1].failure
        assert "more than 100,000 bytes" in shown[2].failure
        assert await bash(worlds[0], "true") == Observation(failure=shown[0].failure)
        sibling = await environment.start(PROBLEM)
        assert (await bash(sibling, "cat note.txt")).text == "hello"

    use(body, command_seconds=3.0, timeout=10)


def test_a_busy_server_is_asked_again(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2b_server, "_FIRST_WAIT", 0.01)

    async def body(environment: E2BEnvironment) -> None:
        cloud.busy = 3
        world = await environment.start(PROBLEM)
        assert len(cloud.sandboxes) == 1
        cloud.break_off = True
        with pytest.raises(WorldError, match=r"closed before|not known"):
            await bash(world, "true")
        cloud.break_off = False
        cloud.busy = 100
        with pytest.raises(WorldError, match="status 429: rate limit"):
            await environment.start(PROBLEM)
        cloud.busy = 0

    use(body)
    starts = [path for _, path in cloud.requests if path == "/process.Process/Start"]
    assert len(starts) == 1  # a command is never repeated


@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize("is_slow", [False, True])
def test_answers_are_limited_in_bytes_and_time(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, status: int, is_slow: bool
) -> None:
    monkeypatch.setattr(e2b, "_MAX_FILE", 100_000)
    monkeypatch.setattr(e2b_server, "_MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setattr(e2b_server, "_FIRST_WAIT", 0.01)
    if is_slow:
        monkeypatch.setattr(e2b, "_MAX_FILE", 1 << 40)
        monkeypatch.setattr(e2b_server, "_MAX_ERROR_BYTES", 1 << 40)
        cloud.drip = 0.05

    async def body(environment: E2BEnvironment) -> None:
        world = await environment.start(PROBLEM)
        cloud.encoding = "gzip"  # although the request excludes it
        with pytest.raises(WorldError, match="the content encoding gzip"):
            await call(world, "read_file", path="note.txt")
        cloud.encoding = ""
        cloud.status = status
        if is_slow:
            monkeypatch.setattr(e2b_server, "_ANSWER_SECONDS", 0.3)
        late = "did not finish its response within 0.3 s"
        cloud.endless = "/files"
        try:
            shown = await call(world, "read_file", path="note.txt")
            assert not is_slow and status in (200, 404)
            assert shown.text.startswith("x" if status == 200 else "Error: x")
        except WorldError as error:
            assert (late if is_slow else "status 500") in str(error)
        cloud.endless = "/filesystem.Filesystem/ListDir"
        if status != 404 or is_slow:
            with pytest.raises(WorldError, match=late if is_slow else "more than 100,000|500"):
                await world.observe()
        cloud.endless = "/process.Process/Start"
        if not is_slow:
            with pytest.raises(WorldError, match=r"status|unexpected format|not respond"):
                await bash(world, "true")
        cloud.endless = "/v2/sandboxes"
        with pytest.raises((WorldError, MissingError), match=late if is_slow else "more than|x{9}"):
            await environment.remove_leftovers()
        cloud.endless = ""

    use(body)
    assert cloud.sandboxes == {}


@pytest.mark.parametrize(
    "form", [[], {}, 3, "x", [3], {"sandboxID": {}}, [{"sandbox": 3}], [{"error": "x"}]], ids=str
)
def test_answers_in_an_unknown_form_are_errors_of_the_world(cloud: Cloud, form: Any) -> None:
    async def body(environment: E2BEnvironment) -> None:
        world = await environment.start(PROBLEM)
        cloud.form = form
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: environment.start(PROBLEM),
            world.snapshot,
            environment.remove_leftovers,
        ]
        for attempt in calls:
            try:
                await attempt()
            except WorldError as error:
                assert "unexpected format" in str(error) or "did not respond" in str(error)
        cloud.form = None

    use(body)


def test_a_sandbox_that_cannot_be_ended_is_named_and_tried_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b_server, "_FIRST_WAIT", 0.01)

    async def body(environment: E2BEnvironment) -> None:
        world, other = [await environment.start(PROBLEM) for _ in range(2)]
        cloud.failing = 3
        await world.close()  # it is asked again
        assert len(cloud.sandboxes) == 1
        cloud.failing = 100
        with pytest.warns(RuntimeWarning, match=f"the sandbox {other.id} of E2B still exists"):
            await other.close()
        with pytest.raises(StoppedError, match="world is closed"):
            await bash(other, "true")
        snapshot = await (third := await environment.start(PROBLEM)).snapshot()
        name = snapshot.partition("~")[0]
        with pytest.warns(RuntimeWarning, match=f"the snapshot {name} of E2B still exists"):
            await environment.delete(snapshot)
        with pytest.warns(RuntimeWarning, match="of E2B still exists") as said:
            await environment.close()
        assert len(said) == 3 and any(third.id in str(each.message) for each in said)
        cloud.failing = 0
        await other.close()
        assert list(cloud.sandboxes) == [third.id]

    use(body)
    assert cloud.sandboxes == {} and list(cloud.templates) == ["base"]


def test_snapshots_stay_for_the_next_process(cloud: Cloud) -> None:
    async def leave(environment: E2BEnvironment) -> list[str]:
        world = await environment.start(PROBLEM)
        names = [await world.snapshot() for _ in range(3)]
        await environment.close(names[:2])
        environment.snapshots.clear()
        return names

    kept = use(leave)[:2]
    first, second = [name for name in cloud.templates if name != "base"]
    assert [name.partition("~")[0] for name in kept] == [first, second]

    async def body(environment: E2BEnvironment) -> None:
        await environment.delete(kept[0])  # of another process, as any template may be
        assert first in cloud.templates
        assert await environment.remove_leftovers(kept) == 0
        assert (await bash(await environment.restore(kept[0]), "cat note.txt")).text == "hello"
        await environment.delete(kept[0])
        await environment.delete("base")

    use(body)
    assert list(cloud.templates) == ["base", second]

    async def start(environment: E2BEnvironment) -> None:
        assert (await bash(await environment.start(PROBLEM), "cat note.txt")).text == "hello"

    use(start, template=kept[1])  # the id of a snapshot is also the name of a template
    use(start, template=second)


def test_ids_that_another_key_has_signed_name_no_template(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory of somebody else neither uses nor deletes templates of this account."""
    monkeypatch.setenv("E2B_API_KEY", "e2b_ffffffffffffffff")
    foreign = E2BEnvironment(allow_code_execution=True).make_id("base")
    monkeypatch.setenv("E2B_API_KEY", KEY)

    async def body(environment: E2BEnvironment) -> None:
        wrong = ["base", "", "~", "base~", "base~\xe9", "base\udc00~x", foreign]
        await environment.remove_leftovers(wrong)
        for name in wrong:
            with pytest.raises(InputError, match="there is no snapshot"):
                await environment.restore(name)
            await environment.delete(name)

    use(body)
    assert list(cloud.templates) == ["base"]


def test_sandboxes_live_on_while_they_are_used(cloud: Cloud) -> None:
    async def body(environment: E2BEnvironment) -> None:
        world = await environment.start(PROBLEM)
        for _ in range(5):
            await bash(world, "sleep 0.25")

    use(body, command_seconds=1.0, timeout=2)
    assert 1 <= [path.endswith("/timeout") for _, path in cloud.requests].count(True) <= 3


def test_leftovers_are_found_by_the_name_of_the_run(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b_server, "_FIRST_WAIT", 0.01)

    async def leave(environment: E2BEnvironment) -> None:
        await environment.start(PROBLEM)
        await environment._server.close()  # as if the process had been killed
        environment.worlds.clear()

    use(leave, run_name="runs/a & b")
    use(leave, run_name="other")
    assert len(cloud.sandboxes) == 2

    async def body(environment: E2BEnvironment) -> None:
        world = await environment.start(PROBLEM)
        cloud.failing = 100
        with pytest.warns(RuntimeWarning, match="of E2B still exists"):
            assert await environment.remove_leftovers() == 0
        cloud.failing = 0
        assert await environment.remove_leftovers() == 1
        assert await environment.remove_leftovers() == 0
        assert (await bash(world, "cat note.txt")).text == "hello"

    use(body, run_name="runs/a & b")
    (left,) = cloud.sandboxes.values()
    assert left.body["metadata"] == {"treegen": "other"}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_leftovers_are_found_on_all_pages(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, *, has_tokens: bool
) -> None:
    async def leave(environment: E2BEnvironment) -> None:
        for _ in range(3):
            await environment.start(PROBLEM)
        await environment._server.close()
        environment.worlds.clear()

    use(leave, run_name="run")
    cloud.page, cloud.has_tokens = 2, has_tokens

    async def body(environment: E2BEnvironment) -> None:
        assert await environment.remove_leftovers() == 3
        cloud.has_tokens = True
        worlds = [await environment.start(PROBLEM) for _ in range(2)]  # these fill the first page
        other = E2BEnvironment(allow_code_execution=True, run_name="run")
        await other.start(PROBLEM)
        await other._server.close()
        assert await environment.remove_leftovers() == 1
        assert set(cloud.sandboxes) == {world.id for world in worlds}
        cloud.page = 1
        monkeypatch.setattr(e2b_server, "MAX_PAGES", 1)
        with pytest.raises(WorldError, match="more than 1 pages"):
            await environment.remove_leftovers()

    use(body, run_name="run")
    assert not cloud.sandboxes


def test_the_key_is_nowhere(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in what a world shows or stores, and not in messages, even if the server repeats it."""
    tokens: list[str] = []

    async def body(environment: E2BEnvironment) -> list[Any]:
        world = await environment.start(PROBLEM)
        (sandbox,) = cloud.sandboxes.values()
        tokens.append(sandbox.token)
        shown = [asdict(await bash(world, "env; cat *")), await world.snapshot()]
        sandbox.token = "changed"
        with pytest.raises(WorldError, match=r"token \*\*\* is wrong; check") as error:
            await call(world, "list_files")
        shown += [str(error.value), repr(environment), repr(world), *map(str, environment.tools)]
        sandbox.token = tokens[0]
        return shown

    shown = json.dumps(use(body))
    assert KEY not in shown and tokens[0] not in shown
    monkeypatch.setenv("E2B_API_KEY", wrong := "e2b_ffffffffffffffff")
    with pytest.raises(WorldError, match=r"401: unauthorized: the key \*\*\* is not") as error:
        use(lambda environment: environment.start(PROBLEM))
    assert wrong not in str(error.value)


def test_bad_arguments(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="allow_code_execution=True"):
        E2BEnvironment()
    with pytest.raises(InputError, match="timeout at least twice"):
        E2BEnvironment(allow_code_execution=True, command_seconds=60, timeout=100)
    with pytest.raises(InputError, match="the template 'none' was not found"):
        use(lambda environment: environment.start(PROBLEM), template="none")
    files = Problem("p", "", "", metadata={"files": {"a/": "x", "": "y"}})
    with pytest.raises(InputError, match="initial files of a problem"):
        use(lambda environment: environment.start(files))
    assert cloud.sandboxes == {}
    monkeypatch.setattr(e2b_server, "_FIRST_WAIT", 0.01)
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(WorldError, match=r"127.0.0.1 cannot be reached .* check E2B_API_URL"):
        use(lambda environment: environment.start(PROBLEM))
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(InputError, match="set the environment variable E2B_API_KEY"):
        E2BEnvironment(allow_code_execution=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("E2B_API_KEY", "clé-secret"),
        ("E2B_API_KEY", "secret\n"),
        ("E2B_API_URL", "http://127.0.0.1:secret"),
        ("E2B_API_URL", "http://[::1"),
        ("E2B_API_URL", "127.0.0.1:8000"),
        ("E2B_API_URL", "http://"),
        ("E2B_SANDBOX_URL", "http://a\nb"),
        ("E2B_DOMAIN", "a b"),
    ],
)
def test_bad_keys_and_addresses_are_refused_at_once(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=name) as error:
        e2b_server.E2BServer()
    assert "secret" not in str(error.value)


def test_messages_never_end_within_a_key(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    server = e2b_server.E2BServer()
    for body, is_cut in (
        (b"x" * 295 + KEY.encode(), False),
        (b" " * 999 + KEY[:-4].encode(), True),
    ):
        text = server.message_of(e2b_server.Answer("host", 500, body, is_cut))
        assert KEY[:4] not in text
