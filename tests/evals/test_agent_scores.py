"""Episodes that are scored by the world at their end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from agent_runs import load_job, run_job, walker
from killed_agents import LoggedTask, LoggedWorld, StoredWorld

from treegen.errors import InputError, WorldError
from treegen.evals.problem import Problem
from treegen.evals.search.agent_search import RunAgent
from treegen.evals.search.agent_task import Assessment
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.runs import RecordFile
from treegen.search.environments.protocol import Environment, World


class ScoredTask(LoggedTask):
    """Text worlds with snapshots, scored by their worlds."""

    def __init__(self, log: Path, check: Callable[[LoggedWorld], None] = lambda world: None):
        super().__init__(str(log), stores=True)
        self.scored_worlds, self._check = frozenset({"memory"}), check

    async def assess_world(
        self, problem: Problem, world: World, environment: Environment
    ) -> Assessment:
        assert isinstance(world, StoredWorld)
        self._check(world._world)
        return Assessment(world._world.observe().is_done, {"actions": len(world._world.path)})


def search(task: ScoredTask, path: Path, **how: Any) -> list[Any]:
    """Run searches, and return their records."""
    extra = {"problems": "2", "level": "easy"}
    job = load_job(task, "beam", extra=extra, width=2, expand=2, depth=25)
    run_job(job, walker(0.2), path, **how)
    return list(RecordFile(path / "trees.jsonl", writable=False).records())


@pytest.mark.filterwarnings("error")
def test_no_action_runs_again_to_score_an_episode_that_ended(tmp_path: Path) -> None:
    records = search(ScoredTask(tmp_path / "log"), tmp_path / "run")
    assert all(record["scores"]["actions"] > 0 for record in records)
    assert any(record["solved"] for record in records)
    ran = (tmp_path / "log").read_text().splitlines()
    assert len(ran) == len(set(ran))
    assert not list((tmp_path / "run" / "worlds").iterdir())


def fail(world: LoggedWorld) -> None:
    raise WorldError("the sandbox is gone")


def test_an_episode_that_cannot_be_scored_stays_in_its_record(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="cannot be scored and counts as not solved: the sand"):
        records = search(ScoredTask(tmp_path / "log", fail), tmp_path / "run")
    for record in records:
        assert record["scores"] == {"failure": "the sandbox is gone"}
        assert record["best"] is not None and record["candidates"]
        assert not record["solved"] and not record["error"]


@pytest.mark.filterwarnings("error")
def test_an_interrupted_score_is_tried_again(tmp_path: Path) -> None:
    stopped = []

    def fail_and_stop(world: LoggedWorld) -> None:
        stopped.append(True)
        fail(world)

    first = ScoredTask(tmp_path / "log", fail_and_stop)
    assert search(first, tmp_path / "run", stop=lambda: bool(stopped)) == []
    records = search(ScoredTask(tmp_path / "log"), tmp_path / "run", resume=True)
    assert [record["best"] is not None for record in records] == [True, True]
    assert all(record["scores"]["actions"] > 0 for record in records)
    ran = (tmp_path / "log").read_text().splitlines()
    assert len(ran) == len(set(ran))


def test_a_resumed_run_deletes_the_snapshots_of_stored_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"

    def stored() -> set[str]:
        return {path.name for path in (run / "worlds").iterdir()}

    async def do_nothing(environment: JournaledEnvironment) -> None: ...

    with monkeypatch.context() as patch:  # as if the process had been killed
        patch.setattr(JournaledEnvironment, "delete_finished", do_nothing)
        records = search(ScoredTask(log), run, stop=lambda: (run / "trees.jsonl").stat().st_size)
    assert len(records) == 1
    before, after = stored(), list[set[str]]()
    assert before
    task = ScoredTask(log, lambda world: after.append(stored()))
    assert len(search(task, run, resume=True)) == 2
    assert after and not after[0] & before


def test_an_environment_describes_itself_by_a_list_of_texts() -> None:
    nothing = cast(Any, None)

    def lines_of(environment: Any) -> list[str]:
        agent = RunAgent(nothing, nothing, environment, nothing, (), False)
        return agent.describe_environment()

    class Described:
        def __init__(self, lines: Any):
            self.describe = lambda: lines

    assert lines_of(object()) == [] and lines_of(Described(["a", "b"])) == ["a", "b"]
    for wrong in ("a", None, [1], ("a",)):
        with pytest.raises(InputError, match=r"describe\(\) must return a list of texts, got "):
            lines_of(Described(wrong))
