"""Runs of agents that are killed go on: nothing is lost, and no action runs twice."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import load_job, run_job, walker
from fork_server import ForkServer
from killed_agents import LoggedTask

from treegen.evals.problem import Problem
from treegen.evals.search import journaled_environment
from treegen.runs import RecordFile

Key = tuple[str, tuple[str, ...], str]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(
        "import fork_server, killed_agents; fork_server.serve(killed_agents.run)"
    ) as it:
        yield it


def journal_of(path: Path) -> set[Key]:
    """The actions that have an end in the journal."""
    file = path / "actions.jsonl"
    if not file.exists():
        return set()
    keys, paths = set[Key](), dict[str, tuple[str, ...]]({"": ()})
    for line in RecordFile(file, writable=False).records():
        action = [line["action"]["name"], line["action"]["arguments"]]
        key = json.dumps(action, sort_keys=True, ensure_ascii=False)
        before = paths[line["before"]]
        paths[line["id"]] = (*before, key)
        if "observation" in line:
            keys.add((line["problem_id"], before, key))
    return keys


def log_of(file: Path) -> list[Key]:
    if not file.exists():
        return []
    lines = map(json.loads, file.read_text().splitlines())
    return [(name, tuple(path), key) for name, path, key in lines]


def trees_of(path: Path) -> dict[str, Any]:
    records = RecordFile(path / "trees.jsonl", writable=False).records()
    names = ("solved", "nodes", "best", "candidates", "stopped", "scores")
    return {record["problem_id"]: {name: record[name] for name in names} for record in records}


def kill_and_resume(
    server: ForkServer, folder: Path, method: str, *, stores: bool, kills: int, seed: int
) -> None:
    """Kill a run some times, let it end, and compare it with one that was not killed."""
    folder.mkdir()
    job: dict[str, Any] = {"method": method, "stores": stores, "resume": False}
    whole = {**job, "path": str(folder / "whole"), "log": str(folder / "whole.log")}
    begin = time.monotonic()
    assert server.run(whole) == 0
    seconds = time.monotonic() - begin
    rng, left, number = random.Random(seed), kills, 0
    while left:
        number += 1
        path, log = folder / f"killed{number}", folder / f"killed{number}.log"
        job |= {"path": str(path), "log": str(log), "resume": False}
        stored_at: list[tuple[int, set[Key]]] = []
        while left and server.run(job, rng.random() * seconds * 1.5 / kills) != 0:
            stored_at.append((len(log_of(log)), journal_of(path)))
            job["resume"] = (path / "run.json").exists()
            left -= 1
        if not left:
            assert server.run(job) == 0
        assert trees_of(path) == trees_of(folder / "whole")
        assert journal_of(path) == journal_of(folder / "whole")
        if stores:
            assert not list((path / "worlds").iterdir())
            ran = log_of(log)
            for place, stored in stored_at:
                assert not [key for key in ran[place:] if key in stored]
    if stores:
        ran = log_of(folder / "whole.log")
        assert len(ran) == len(set(ran))


@pytest.mark.parametrize(("method", "stores"), [("beam", True), ("mcts", True), ("beam", False)])
def test_a_killed_run_goes_on(
    server: ForkServer, tmp_path: Path, method: str, stores: bool
) -> None:
    kill_and_resume(server, tmp_path / "run", method, stores=stores, kills=3, seed=1)


def test_an_interrupted_run_goes_on_from_its_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_environment, "_MAX_SPARE", 8)
    task = LoggedTask(str(tmp_path / "log"), stores=True)
    job = load_job(task, "beam", extra={"problems": "2"}, width=2, expand=3, depth=25)
    policy, num_replies = walker(0.4), 0
    num_stored: list[int] = []
    worlds = tmp_path / "run" / "worlds"

    def reply(problem: Problem, context: str, seed: int) -> str:
        nonlocal num_replies
        num_replies += 1
        if num_replies == 40:
            raise KeyboardInterrupt
        num_stored.append(len(list(worlds.iterdir())) if worlds.exists() else 0)
        return policy(problem, context, seed)

    with pytest.raises(KeyboardInterrupt):
        run_job(job, reply, tmp_path / "run")
    assert list(worlds.iterdir())
    run_job(job, reply, tmp_path / "run", resume=True)
    assert not list(worlds.iterdir())
    ran = log_of(tmp_path / "log")
    assert len(ran) == len(set(ran)) > 2 * max(num_stored)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_kills(server: ForkServer, tmp_path: Path) -> None:
    # Not dvts: these runs use a plain event loop, in which timing orders its parallel subtrees.
    for round, method in enumerate(("best-of-n", "beam", "mcts", "ab-mcts", "rebase")):
        where = tmp_path / method
        kill_and_resume(server, where, method, stores=round % 3 != 2, kills=12, seed=round)
