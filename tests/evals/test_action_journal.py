"""The journal of actions: what is read, restored and run again, and what differs is an error."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policies import call
from counting_worlds import EPISODE, Counter, Counters, act, opened

from treegen.errors import InputError, RunError, WorldError
from treegen.evals.problem import Problem
from treegen.evals.search.action_journal import Episode
from treegen.evals.search.agent_search import RunAgent
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.prompts.replies.types import ToolCall
from treegen.runs.record_format import decode_record, encode_record
from treegen.search.environments.protocol import Observation, describe_failure

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
        pytest.warns(RuntimeWarning, match="treegen runs stored actions again"),
    ):
        assert asyncio.run(act(environment, "add", "add", "add", "add"))[-1] == "now 4"
    assert inner.ran == ["1add", "2add", "3add", "close"]


def test_an_action_that_shows_something_else_ends_its_branch(tmp_path: Path) -> None:
    with opened(tmp_path, Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, "add", "add"))
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        inner.word = "later"
        with pytest.raises(
            WorldError, match="action 1 of an episode, add, returned a different result"
        ):
            asyncio.run(act(environment, "add", "add", "add"))
    assert inner.ran == ["0add", "close"]


def test_a_world_that_does_not_close_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close(self: Counter) -> None:
        raise OSError("the container is gone")

    with opened(tmp_path, Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, "add", "add"))
    monkeypatch.setattr(Counter, "close", close)
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        inner.word = "later"
        with pytest.raises(WorldError, match="returned a different result"):
            asyncio.run(act(environment, "add", "add", "add"))


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
        assert lines[0].startswith('the run stopped during the action ["add", {}] of a search')
        assert lines[1].startswith("2 actions are stored") and "keeps no snapshots" in lines[2]
        assert asyncio.run(act(environment, "add", "add", "add"))[-1] == "now 3"
        assert environment.journal.list_unfinished(["a search"]) == []


def test_actions_of_earlier_versions_do_not_run_again(tmp_path: Path, repository: Path) -> None:
    names = ("add", "look", "?", "add", "?", "look")
    path = tmp_path / "actions.jsonl"
    shutil.copy(repository / "tests" / "data" / "old_actions.jsonl", path)
    old = path.read_bytes()
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        key = '["add", {}]'
        assert environment.journal.list_unfinished(["a search"]) == [("a search", key)]
        texts = ["now 1", "now 1", "at 1", "now 2", "at 2", "now 2"]
        assert asyncio.run(act(environment, *names)) == texts and inner.ran == []
        assert asyncio.run(act(environment, "add", "add", "add", "?")) == [
            "now 1",
            "now 2",
            "now 3",
            "at 3",
        ]
    assert inner.ran == ["0add", "1add", "2add", "3?", "close"]
    assert path.read_bytes().startswith(old)
    with opened(tmp_path, inner := Counters({}), keeps=False) as environment:
        assert environment.journal.list_unfinished(["a search"]) == []
        assert asyncio.run(act(environment, *names, "add", "?"))[-2:] == ["now 3", "at 3"]
    assert inner.ran == []


def test_lines_name_the_action_before_theirs_and_stay_short(tmp_path: Path) -> None:
    with opened(tmp_path, Counters({}), keeps=False) as environment:
        asyncio.run(act(environment, *["sub"] * 60, "look", "add"))
    path = tmp_path / "actions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) < 350
    records = [*map(decode_record, lines)]
    begins = [record for record in records if "begins" in record]
    ends = [
        record
        for record in records
        if "begins" not in record and record["action"]["name"] != "look"
    ]
    assert [record["id"] for record in begins] == [record["id"] for record in ends]
    assert [record["before"] for record in ends] == ["", *(record["id"] for record in ends[:-1])]
    assert len({record["id"] for record in records}) == 62
    (look,) = [record for record in records if record["action"]["name"] == "look"]
    assert look["before"] == ends[-2]["id"]


def test_a_failed_observation_is_stored(tmp_path: Path) -> None:
    class Unseen(Counter):
        async def observe(self) -> Observation:
            self.environment.ran.append("?")
            raise OSError("no network")

    class Dark(Counters):
        async def start(self, problem: Problem) -> Counter:
            return Unseen(self)

    for kind, ran in ((Dark, ["0add", "?", "close"]), (Counters, [])):
        with opened(tmp_path, inner := kind({}), keeps=False) as environment:
            with pytest.raises(Exception, match="no network") as raised:
                asyncio.run(observe_and_close(environment))
            assert describe_failure(raised.value) == "OSError: no network"
        assert inner.ran == ran


async def observe_and_close(environment: JournaledEnvironment) -> None:
    world = await environment.start(EPISODE)
    try:
        await world.run(call("add"))
        await world.observe()
    finally:
        await world.close()


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
