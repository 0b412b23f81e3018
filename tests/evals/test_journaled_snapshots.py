"""Snapshots of stored actions: when they are made, kept, restored and deleted."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from agent_policies import call
from counting_worlds import EPISODE, Counter, Counters, act, opened

from treegen.errors import CapacityError, WorldError
from treegen.evals.problem import Problem
from treegen.evals.search import journaled_environment
from treegen.evals.search.action_journal import Episode
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.search.environments.protocol import call_key


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
        with pytest.warns(RuntimeWarning, match="treegen runs stored actions again"):
            assert asyncio.run(act(environment, "add", "add", "add"))[-1] == "now 3"


@pytest.mark.filterwarnings("error")
def test_lost_snapshots_are_said_once(tmp_path: Path) -> None:
    stored: dict[str, int] = {}
    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        asyncio.run(act(environment, "add", "add"))
    stored.clear()
    with opened(tmp_path, Counters(stored), keeps=True) as environment:
        with pytest.warns(RuntimeWarning, match="treegen runs stored actions again"):
            asyncio.run(act(environment, "add", "add", "sub"))
        asyncio.run(act(environment, "add", "add", "also"))
