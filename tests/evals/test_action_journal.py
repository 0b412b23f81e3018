"""The journal of actions: what is read, restored and run again, and what differs is an error."""

import asyncio
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policies import call

from treegen.errors import CapacityError, InputError, RunError, WorldError
from treegen.evals.problem import Problem
from treegen.evals.search import journaled_environment
from treegen.evals.search.action_journal import ActionJournal, Episode
from treegen.evals.search.agent_search import RunAgent
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.prompts.replies.types import ToolCall
from treegen.runs import open_for_append
from treegen.runs.record_lines import decode_record, encode_record
from treegen.search.environments.observations import call_key, describe_failure
from treegen.search.environments.protocol import Observation, Traits

EPISODE = Episode("a search", Problem("p", "", ""))


class Counter:
    """A world that counts; `ran` has all actions that any of them has run."""

    def __init__(self, environment: "Counters", number: int = 0) -> None:
        self.environment, self.number = environment, number

    async def run(self, action: ToolCall) -> Observation:
        self.environment.ran.append(f"{self.number}{action.name}")
        if action.name == "add":
            self.number += 1
        text = f"{self.environment.word} {self.number}"
        image = bytes([self.number])
        return Observation(text=text, images=(image,), exit_status=0, is_done=self.number > 8)

    async def observe(self) -> Observation:
        self.environment.ran.append(f"{self.number}?")
        return Observation(text=f"at {self.number}", reward=self.number / 10)

    async def snapshot(self) -> str:
        if not self.environment.traits.has_snapshots:
            raise WorldError("no snapshots")
        name = f"s{secrets.token_hex(4)}-{self.number}"
        self.environment.stored[name] = self.number
        return name

    async def close(self) -> None:
        self.environment.ran.append("close")


class Counters:
    """An environment whose snapshots are in a dictionary of the test."""

    tools = ()

    def __init__(self, stored: dict[str, int], *, has_snapshots: bool = True) -> None:
        self.stored, self.ran, self.word = stored, list[str](), "now"
        self.traits = Traits(has_snapshots=has_snapshots, pure_tools=frozenset({"look"}))

    async def start(self, problem: Problem) -> Counter:
        assert problem.id == "p"
        return Counter(self)

    async def restore(self, snapshot: str) -> Counter:
        if snapshot not in self.stored:
            raise InputError(f"no snapshot {snapshot}")
        return Counter(self, self.stored[snapshot])

    async def delete(self, snapshot: str) -> None:
        self.stored.pop(snapshot, None)

    async def close(self) -> None: ...


@contextmanager
def opened(
    folder: Path, inner: Counters, *, keeps: bool, seconds: float = 60.0
) -> Iterator[JournaledEnvironment]:
    with open_for_append(folder / "actions.jsonl", "actions.lock") as file:
        journal = ActionJournal(file)
        yield JournaledEnvironment(inner, journal, keeps_snapshots=keeps, max_seconds=seconds)


async def act(environment: JournaledEnvironment, *names: str) -> list[str]:
    world = await environment.start(EPISODE)
    texts = []
    for name in names:
        shown = await (world.observe() if name == "?" else world.run(call(name)))
        texts.append(shown.text)
    await world.close()
    return texts


NAMES = ("add", "look", "look", "?", "?", "add", "?")


@pytest.mark.parametrize("keeps", [True, False])
def test_stored_actions_do_not_run_again(tmp_path: Path, keeps: bool) -> None:
    stored: dict[str, int] = {}
    with opened(tmp_path, first := Counters(stored), keeps=keeps) as environment:
        texts = asyncio.run(act(environment, *NAMES))
        again = asyncio.run(act(environment, *NAMES))
    assert texts == again == ["now 1", "now 1", "now 1", "at 1", "at 1", "now 2", "at 2"]
    assert first.ran == ["0add", "1look", "1?", "1add", "2?", "close"]
    assert sorted(stored.values()) == ([1, 2] if keeps else [])
    with opened(tmp_path, second := Counters(stored), keeps=keeps) as environment:
        assert asyncio.run(act(environment, *NAMES)) == texts
        assert second.ran == []
        assert asyncio.run(act(environment, *NAMES, "add"))[-1] == "now 3"
        assert environment.journal.num_replayed == (0 if keeps else 2)
    again_ran = [] if keeps else ["0add", "1add"]
    assert second.ran == [*again_ran, "2add", "close"]


def test_the_last_snapshot_that_survived_is_restored(tmp_path: Path) -> None:
    stored: dict[str, int] = {}
    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        asyncio.run(act(environment, "add", "add", "add"))
    for name in [name for name, number in stored.items() if number in (2, 3)]:
        del stored[name]
    with (
        opened(tmp_path, inner := Counters(stored), keeps=True) as environment,
        pytest.warns(RuntimeWarning, match="stored actions run again"),
    ):
        assert asyncio.run(act(environment, "add", "add", "add", "add"))[-1] == "now 4"
    assert inner.ran == ["1add", "2add", "3add", "close"]


def test_an_action_that_shows_something_else_ends_its_branch(tmp_path: Path) -> None:
    with opened(tmp_path, Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, "add", "add"))
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        inner.word = "later"
        with pytest.raises(WorldError, match="action 1 of an episode, add, shows something else"):
            asyncio.run(act(environment, "add", "add", "add"))
    assert inner.ran == ["0add", "close"]


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_forks_are_restored_or_replayed(tmp_path: Path, has_snapshots: bool) -> None:
    async def fork(environment: JournaledEnvironment) -> list[str]:
        world = await environment.start(EPISODE)
        await world.run(call("add"))
        name = await world.snapshot()
        await world.run(call("add"))
        other = await environment.restore(name)
        shown = [(await other.run(call("sub"))).text, (await other.run(call("add"))).text]
        await environment.delete(name)
        await environment.delete(name)
        with pytest.raises(InputError, match="no snapshot"):
            await environment.restore(name)
        await world.close()
        await other.close()
        return shown

    inner = Counters({}, has_snapshots=has_snapshots)
    with opened(tmp_path, inner, keeps=False) as environment:
        assert environment.traits.has_snapshots
        assert asyncio.run(fork(environment)) == ["now 1", "now 2"]
    again = [] if has_snapshots else ["0add"]
    assert inner.ran == ["0add", "1add", *again, "1sub", "1add", "close", "close"]
    assert inner.stored == {}


@pytest.mark.filterwarnings("error")
def test_a_state_is_revived_from_its_own_snapshot(tmp_path: Path) -> None:
    async def revive(environment: JournaledEnvironment) -> list[int]:
        await act(environment, "add", "add")
        inner.word = "later"  # what an action shows depends on the time
        key = call_key(call("add"))
        worlds: list[Any] = [await environment.revive(EPISODE, (key,) * n) for n in range(3)]
        return [world.number for world in worlds]

    with opened(tmp_path, inner := Counters({}), keeps=True) as environment:
        assert asyncio.run(revive(environment)) == [0, 1, 2]
        assert inner.ran == ["0add", "1add", "close"]
        environment.finished.append("a search")
        asyncio.run(environment.delete_finished())
        assert inner.stored == {}


def test_searches_have_their_own_actions(tmp_path: Path) -> None:
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, "add"))

        async def other() -> str:
            world = await environment.start(Episode("another", EPISODE.problem))
            return (await world.run(call("add"))).text

        assert asyncio.run(other()) == "now 1"
        assert inner.ran == ["0add", "close", "0add"]
        assert environment.journal.num_stored == 2


class Failing(Counter):
    """A world whose third action is an error of the environment."""

    async def run(self, action: ToolCall) -> Observation:
        if self.number == 2:
            self.environment.ran.append("2fails")
            raise WorldError("the disk is gone")
        return await super().run(action)


class Failures(Counters):
    async def start(self, problem: Problem) -> Counter:
        return Failing(self)


def test_an_error_without_a_text_is_a_failure_in_a_resumed_run_too(tmp_path: Path) -> None:
    class Silent(Counter):
        async def run(self, action: ToolCall) -> Observation:
            raise WorldError

    class Silents(Counters):
        async def start(self, problem: Problem) -> Counter:
            return Silent(self)

    for _ in range(2):
        with opened(tmp_path, Silents({}), keeps=False) as environment:
            with pytest.raises(WorldError) as raised:
                asyncio.run(act(environment, "add"))
            assert describe_failure(raised.value) == "WorldError"


def test_an_action_that_failed_does_not_run_again(tmp_path: Path) -> None:
    for keeps in (True, False):
        for process in range(2):
            (folder := tmp_path / str(keeps)).mkdir(exist_ok=True)
            with (
                opened(folder, inner := Failures({}), keeps=keeps) as environment,
                pytest.raises(WorldError, match=r"^the disk is gone$"),
            ):
                asyncio.run(act(environment, "add", "add", "add"))
            assert ("2fails" in inner.ran) == (process == 0)


def test_a_snapshot_goes_once_nothing_is_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_environment, "_MAX_SPARE", 0)
    stored: dict[str, int] = {}
    running = [True]
    episode = Episode("a search", EPISODE.problem, lambda: running[0])

    async def body(environment: JournaledEnvironment) -> None:
        world = await environment.start(episode)
        await world.run(call("add"))
        name = await world.snapshot()
        await world.run(call("add"))
        assert sorted(stored.values()) == [1, 2]
        fork = await environment.restore(name)
        await environment.delete(name)
        assert sorted(stored.values()) == [1, 2]
        await fork.close()
        await fork.close()
        assert sorted(stored.values()) == [2]
        await world.run(call("add"))
        assert sorted(stored.values()) == [3]
        running[0] = False  # the search has stopped, so a resumed run may return to the state
        await world.run(call("add"))
        await world.close()
        assert sorted(stored.values()) == [3, 4]

    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        asyncio.run(body(environment))
        asyncio.run(environment.close())
    assert sorted(stored.values()) == [3, 4]
    with opened(tmp_path, inner := Counters(stored), keeps=True) as environment:
        assert asyncio.run(act(environment, *["add"] * 5))[-1] == "now 5"
        assert inner.ran == ["4add", "close"]
        environment.finished.append("a search")
        asyncio.run(environment.delete_finished())
        assert not stored


def test_spare_snapshots_count_for_each_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_environment, "_MAX_SPARE", 2)
    stored: dict[str, int] = {}

    async def body(environment: JournaledEnvironment) -> None:
        for number in range(3):
            world = await environment.start(Episode(f"{number}", EPISODE.problem, lambda: True))
            for _ in range(4):
                await world.run(call("add"))
            await world.close()
        assert sorted(stored.values()) == [3, 3, 3, 4, 4, 4]

    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        asyncio.run(body(environment))


@pytest.mark.filterwarnings("ignore:snapshots of some states:RuntimeWarning")
def test_a_snapshot_stays_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_environment, "_MAX_SPARE", 2)
    episode = Episode("a search", EPISODE.problem, lambda: True)

    class Slow(Counters):
        async def restore(self, snapshot: str) -> Counter:
            if snapshot in self.stored:
                restoring.set()
                await go_on.wait()
            return await super().restore(snapshot)

    async def body(environment: JournaledEnvironment) -> None:
        world = await environment.start(episode)
        for name in ("add", "add"):
            await world.run(call(name))
        await world.close()
        (lost,) = [name for name, number in inner.stored.items() if number == 2]
        del inner.stored[lost]
        world = await environment.start(episode)
        for name in ("add", "add"):
            await world.run(call(name))
        on_branch = asyncio.ensure_future(world.run(call("add")))
        await restoring.wait()
        other = await environment.start(episode)
        for name in ("sub", "sub", "sub"):
            await other.run(call(name))
        await other.close()
        go_on.set()
        assert (await on_branch).text == "now 3"
        assert inner.ran.count("0add") == 1

    restoring, go_on = asyncio.Event(), asyncio.Event()
    with opened(tmp_path, inner := Slow({}), keeps=True) as environment:
        asyncio.run(body(environment))


def test_spare_snapshots_give_their_room_to_new_ones(tmp_path: Path) -> None:
    """There is room for three: a search of any length fits, and its last states can be restored."""
    episode = Episode("a search", EPISODE.problem, lambda: True)

    class Small(Counter):
        async def snapshot(self) -> str:
            if len(self.environment.stored) >= 3:
                raise CapacityError("snapshots take too much space")
            return await super().snapshot()

    class Smalls(Counters):
        async def start(self, problem: Problem) -> Counter:
            return Small(self)

    async def body(environment: JournaledEnvironment) -> None:
        world = await environment.start(episode)
        for _ in range(8):
            await world.run(call("add"))
        assert sorted(inner.stored.values()) == [6, 7, 8]  # one goes at a time
        for name in ("sub", "sub"):
            await world.snapshot()
            await world.run(call(name))
        await world.snapshot()
        with pytest.warns(RuntimeWarning, match="no snapshot"):
            await world.run(call("also"))
        with pytest.raises(CapacityError):
            await world.snapshot()

    with opened(tmp_path, inner := Smalls({}), keeps=True) as environment:
        asyncio.run(body(environment))


def test_leftovers_are_removed_before_the_first_world(tmp_path: Path) -> None:
    class Lasting(Counters):
        async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
            for name in stored.keys() - set(keep):
                del stored[name]
            return 0

        async def close(self, keep: Collection[str] = ()) -> None:
            kept.append(list(keep))

    stored, kept = dict[str, int](), list[list[str]]()
    with opened(tmp_path, Lasting(stored), keeps=True) as environment:
        asyncio.run(act(environment, "add"))
        asyncio.run(environment.close())
    stored["orphan"] = 7
    with opened(tmp_path, Lasting(stored), keeps=True) as environment:
        asyncio.run(act(environment, "add"))
        assert sorted(stored.values()) == [1, 7]
        asyncio.run(act(environment, "add", "add"))
        assert sorted(stored.values()) == [1, 2]
        asyncio.run(environment.close())
        environment.is_finished = True
        asyncio.run(environment.close())
    assert not stored
    assert list(map(len, kept)) == [1, 2, 0]


def test_snapshots_of_stored_searches_go_though_the_run_was_killed(tmp_path: Path) -> None:
    """As at E2B, a process can delete snapshots of an earlier one only after `remove_leftovers`."""

    class Lasting(Counters):
        older = frozenset[str]()

        async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
            self.older |= set(keep)
            return 0

        async def delete(self, snapshot: str) -> None:
            if snapshot in self.older:
                await super().delete(snapshot)

        async def close(self, keep: Collection[str] = ()) -> None: ...

    for is_finished in (False, True):
        stored: dict[str, int] = {}
        (folder := tmp_path / str(is_finished)).mkdir()
        with opened(folder, Lasting(stored), keeps=True) as environment:
            asyncio.run(act(environment, "add", "add"))
        assert sorted(stored.values()) == [1, 2]
        with opened(folder, Lasting(stored), keeps=True) as environment:
            environment.is_finished = is_finished
            if not is_finished:
                environment.finished.append("a search")
            asyncio.run(environment.close())
        assert not stored


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_snapshot_that_comes_too_late_is_deleted(tmp_path: Path, is_cancelled: bool) -> None:
    class Slow(Counter):
        async def snapshot(self) -> str:
            name = await super().snapshot()
            await asyncio.sleep(0.3)
            return name

    class Slows(Counters):
        async def start(self, problem: Problem) -> Counter:
            return Slow(self)

    async def body(environment: JournaledEnvironment) -> None:
        world = await environment.start(EPISODE)
        if is_cancelled:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(world.run(call("add")), 0.1)
        else:
            with pytest.warns(RuntimeWarning, match="a snapshot took more than 0.2 seconds"):
                await world.run(call("add"))
        assert len(inner.stored) == 1
        await asyncio.sleep(0.4)
        assert inner.stored == {}
        assert environment.journal.num_stored == 1

    inner = Slows({})
    with opened(tmp_path, inner, keeps=True, seconds=60 if is_cancelled else 0.2) as environment:
        asyncio.run(body(environment))


class Hanging(Counter):
    """A world whose third action does not end."""

    async def run(self, action: ToolCall) -> Observation:
        if self.number == 2:
            self.environment.ran.append("2hangs")
            await asyncio.sleep(60)
        return await super().run(action)


class Hangs(Counters):
    async def start(self, problem: Problem) -> Counter:
        return Hanging(self)


def test_an_action_that_takes_too_long_does_not_run_again(tmp_path: Path) -> None:
    for process in range(2):
        with opened(tmp_path, inner := Hangs({}), keeps=False, seconds=0.2) as environment:
            with pytest.raises(WorldError, match=r"^the action add took more than 0.2 seconds$"):
                asyncio.run(act(environment, "add", "add", "add"))
            assert environment.journal.list_unfinished(["a search"]) == []
        assert ("2hangs" in inner.ran) == (process == 0)


def test_a_cancelled_action_has_begun_and_has_no_end(tmp_path: Path) -> None:
    async def cancel(environment: JournaledEnvironment) -> None:
        await asyncio.wait_for(act(environment, "add", "add", "add"), 0.2)

    with opened(tmp_path, Hangs({}), keeps=False) as environment, pytest.raises(TimeoutError):
        asyncio.run(cancel(environment))
    with opened(tmp_path, Counters({}), keeps=False) as environment:
        key = '["add", {}]'
        assert environment.journal.list_unfinished(["a search"]) == [("a search", key)]
        assert environment.journal.list_unfinished([]) == []
        job: Any = SimpleNamespace(settings=SimpleNamespace(environment="counters"))
        agent: Any = None
        begun = environment.journal.list_unfinished(["a search"])
        lines = RunAgent(
            job, agent, environment.inner, environment, begun, scores_worlds=False
        ).describe_resume()
        assert lines[0].startswith('the action ["add", {}] of a search began and has no stored end')
        assert lines[1].startswith("2 actions are stored") and "keeps no snapshots" in lines[2]
        assert asyncio.run(act(environment, "add", "add", "add"))[-1] == "now 3"
        assert environment.journal.list_unfinished(["a search"]) == []


@pytest.mark.filterwarnings("error")
def test_an_action_counts_though_its_snapshot_fails(tmp_path: Path) -> None:
    class Full(Counter):
        async def snapshot(self) -> str:
            raise WorldError("the disk is full")

    class Fulls(Counters):
        async def start(self, problem: Problem) -> Counter:
            return Full(self)

    with opened(tmp_path, Fulls({}), keeps=True) as environment:
        with pytest.warns(RuntimeWarning, match=r"no snapshot \(the disk is full\)") as warned:
            texts = asyncio.run(act(environment, "add", "add"))
        assert len(warned) == 1
        assert asyncio.run(act(environment, "add", "add")) == texts == ["now 1", "now 2"]
    with opened(tmp_path, inner := Counters({}), keeps=True) as environment:
        assert asyncio.run(act(environment, "add", "add")) == texts
        assert inner.ran == []
        with pytest.warns(RuntimeWarning, match="stored actions run again"):
            assert asyncio.run(act(environment, "add", "add", "add"))[-1] == "now 3"


@pytest.mark.filterwarnings("error")
def test_lost_snapshots_are_said_once(tmp_path: Path) -> None:
    stored: dict[str, int] = {}
    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        asyncio.run(act(environment, "add", "add"))
    stored.clear()
    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        with pytest.warns(RuntimeWarning, match="stored actions run again"):
            asyncio.run(act(environment, "add", "add", "sub"))
        asyncio.run(act(environment, "add", "add", "also"))


@pytest.mark.parametrize(
    "edit",
    [
        {"observation": {"text": 7}},
        {"observation": "x"},
        {"snapshot": 7},
        {"before": 3},
        {"action": None},
        {"observation": {"images": ["zz"]}},
        {"observation": {"reward": 10**400}},
    ],
    ids=range(7),
)
def test_a_line_in_another_form_is_an_error(tmp_path: Path, edit: dict[str, object]) -> None:
    with opened(tmp_path, Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, "add"))
    path = tmp_path / "actions.jsonl"
    start, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(start + encode_record({**decode_record(end), **edit}))
    with (
        pytest.raises(RunError, match=r"actions\.jsonl has an action that cannot be read"),
        opened(tmp_path, Counters({}), keeps=False),
    ):
        pass
