"""Episodes that are scored by the world at their end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_runs import load_job, run_job, walker
from killed_agents import LoggedTask, LoggedWorld, StoredWorld

from treegen.evals.problem import Problem
from treegen.evals.search.agent_task import Assessment
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


def search(task: ScoredTask, path: Path, *, resume: bool = False, **choices: Any) -> list[Any]:
    """Run searches, and return their records."""
    extra = {"problems": "2", "level": "easy"}
    choices = {"width": 2, "expand": 2, "depth": 25, **choices}
    job = load_job(task, "beam", extra=extra, **choices)
    run_job(job, walker(0.2), path, resume=resume)
    return list(RecordFile(path / "trees.jsonl", writable=False).records())


@pytest.mark.filterwarnings("error")
def test_no_action_runs_again_to_score_an_episode_that_ended(tmp_path: Path) -> None:
    records = search(ScoredTask(tmp_path / "log"), tmp_path / "run")
    assert all(record["scores"]["actions"] > 0 for record in records)
    assert any(record["solved"] for record in records)
    ran = (tmp_path / "log").read_text().splitlines()
    assert len(ran) == len(set(ran))
    assert not list((tmp_path / "run" / "worlds").iterdir())
