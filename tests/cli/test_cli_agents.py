"""`treegen search` on tasks of agents: what it writes, prints, continues and refuses."""

import json
import os
from pathlib import Path

import pytest
from cli_cases import Command, trees_of
from walker_model import EXTRA, save_walker_model

from treegen.evals.search.run import find_cut, find_failure
from treegen.runs import RecordFile
from treegen.search.environments.branch import NO_ROOM
from treegen.tasks.environments.directories import DirectorySize
from treegen.tasks.environments.storage import Storage

pytestmark = pytest.mark.usefixtures("elsewhere")

TASK = [word for name, value in EXTRA.items() for word in ("-T", f"{name}={value}")]
FEW = ["--depth", "8", "--max-tokens", "120", "--budget", "actions=40", "--memory", "16MiB"]


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_walker_model(tmp_path_factory.mktemp("walker"))


SMALL = {
    "best-of-n": ["-n", "2"],
    "beam": ["--width", "2", "--expand", "2"],
    "mcts": ["--expand", "2", "--iterations", "4"],
    "lats": ["--expand", "2", "--iterations", "3"],
}


@pytest.mark.parametrize("method", SMALL)
def test_a_model_solves_the_world_that_it_knows(
    treegen: Command, walker: Path, tmp_path: Path, method: str
) -> None:
    run = tmp_path / "run"
    args = ["search", "text-world", *TASK, "-m", method, "-M", walker, *FEW, *SMALL[method]]
    done = treegen(*args, "--temperature", "0.3", "-o", run)
    assert done.code == 0, done.err
    known, _ = records = trees_of(run, "tokens_prefilled")
    assert known["problem_id"] == "text-world-easy-0" and known["solved"]
    assert known["scores"] == {"subgoals": 1.0}
    steps = [node["data"] for node in known["nodes"] if node.get("data")]
    assert all(step["calls"] and step["observations"] for step in steps if "calls" in step)
    results = json.loads((run / "results.json").read_text())
    assert results["num_solved"] >= 1 and results["cost"]["actions"]["total"] > 0
    stored = (run / "actions.jsonl").read_bytes()

    # Without its trees, a run reads its stored actions and takes the same steps.
    os.truncate(run / "trees.jsonl", 0)
    done = treegen("search", "--resume", run)
    assert done.code == 0, done.err
    assert "actions are stored" in done.err and "again if the branch continues" in done.err
    assert trees_of(run, "tokens_prefilled") == records
    assert (run / "actions.jsonl").read_bytes() == stored
    assert "text-world-easy-0" in treegen("show", run, "--tree", "text-world-easy-0").out


def test_every_reply_calls_a_tool_if_forced(treegen: Command, walker: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    run = tmp_path / "run"
    done = treegen(
        f"search text-world -m best-of-n -n 2 -M {walker} --force-calls -o {run} --temperature 2",
        *TASK,
        *FEW,
    )
    assert done.code == 0, done.err
    for record in trees_of(run):
        steps = [node["data"] for node in record["nodes"] if node.get("data")]
        assert steps and all("calls" in step or "failure" in step for step in steps)


def test_a_hint_names_the_option_if_replies_are_cut_off(
    treegen: Command, walker: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = ["search", "text-world", *TASK, "-M", walker, *FEW, "-n", "2", "-o", run]
    done = treegen(*args, "--max-tokens", "5")
    assert done.code == 0
    assert "in 2 of 2 searches, every branch ended because its reply was cut off; raise" in done.err
    assert "--max-tokens" in done.err.splitlines()[-1]
    assert json.loads((run / "results.json").read_text())["cut_off"] == {"max_tokens": 2}
    done = treegen(*args[:-1], tmp_path / "other")
    assert done.code == 0 and "cut off" not in done.err
    assert "cut_off" not in json.loads((tmp_path / "other" / "results.json").read_text())


@pytest.mark.parametrize(
    ("num_tokens", "stopped", "end", "limit"),
    [
        (64, "", "failed", "max_tokens"),
        (64, "budget of 64 tokens reached", "failed", "max_tokens"),
        (63, "budget of 63 tokens reached", "failed", "budget"),
        (63, "", "failed", "context"),
        (63, "", "done", None),
    ],
)
def test_what_has_cut_off_replies(
    num_tokens: int, stopped: str, end: str, limit: str | None
) -> None:
    root = {"leaf": False, "parent_id": None}
    child = {"leaf": True, "parent_id": 0, "n_tokens": num_tokens, "finish_reason": "length"}
    nodes = [root, {**child, "n_tokens": 9, "data": {"end": "failed"}}]
    record = {"nodes": [*nodes, {**child, "data": {"end": end}}], "stopped": stopped}
    assert find_cut(record, 64) == limit
    assert find_cut({"nodes": [{**root, "leaf": True}], "stopped": stopped}, 64) is None


def test_results_without_room_for_a_reply_count_as_cut_off_by_the_context() -> None:
    root = {"leaf": False, "parent_id": None}
    step = {"end": "failed", "failure": NO_ROOM}
    full = {"leaf": True, "parent_id": 0, "n_tokens": 900, "finish_reason": None, "data": step}
    assert find_cut({"nodes": [root, full], "stopped": ""}, 64) == "context"
    other = {**full, "data": {**step, "failure": "the disk is full"}}
    assert find_cut({"nodes": [root, full, other], "stopped": ""}, 64) is None
    assert find_failure({"nodes": [root, full, other]}) == "the disk is full"
    assert find_failure({"nodes": [root, full]}) is None
    assert find_failure({"nodes": [root, other, {**full, "data": {"end": "done"}}]}) is None
    assert find_failure({"nodes": [{**root, "leaf": True}]}) is None


FAILING = """\
from treegen.errors import WorldError
from treegen.search.environments.memory import MemoryEnvironment
from treegen.tasks.agents.tasks import TextWorldTask

class Failing:
    def run(self, action):
        raise WorldError("the power is off")

class FailingTask(TextWorldTask):
    name = "failing"

    def make_environment(self, data, options):
        tools = super().make_environment(data, options).tools
        return MemoryEnvironment(lambda problem: Failing(), tools)
"""


def test_a_hint_names_the_failure_that_ended_all_branches(
    treegen: Command, walker: Path, tmp_path: Path
) -> None:
    (code := tmp_path / "failing.py").write_text(FAILING)
    run = tmp_path / "run"
    args = ["search", f"{code}:FailingTask", *TASK, "-M", walker, *FEW, "-n", "2", "-o", run]
    done = treegen(*args)
    assert done.code == 0
    said = "every branch ended because its environment failed (the power is off); fix the"
    results = json.loads((run / "results.json").read_text())
    (num,) = results["failures"].values()
    assert f"in {num} of 2 searches, {said}" in done.err
    assert [*results["failures"]] == ["the power is off"] and "cut_off" not in results


def test_what_an_agent_cannot_do_is_refused(treegen: Command, walker: Path, tmp_path: Path) -> None:
    for args, message in (
        (["repair"], "--allow-code-execution"),
        (["text-world", "-m", "self-refine"], "requires text, but the task"),
        (["countdown", "-m", "lats"], "requires tool calls, but the task"),
        (["text-world", "-m", "lats", "-a", "weight=2"], "weight"),
        (["text-world", "--environment", "docker"], "there is no environment 'docker'"),
        (["text-world", "--environment", "memory:x"], "there is no environment 'memory:x'"),
        (["countdown", "--environment", "memory"], "is solved by text"),
        (["countdown", "--max-live", "3"], "which is solved by text"),
        (["text-world", "--workers", "2"], "is not supported with workers"),
        (["text-world", "-T", "level=odd"], "level must be one of"),
        (["text-world", "--data", "x.jsonl"], "generates its problems"),
    ):
        done = treegen("search", *args, "-M", walker, "-o", tmp_path / "run")
        assert done.code == 2 and message in done.err, (args, done.err)
        assert not (tmp_path / "run").exists(), args
    for model in ((), ("-M", walker)):
        done = treegen("eval", "text-world", *model)
        assert done.code == 2 and "use `treegen search text-world`" in done.err


def test_files_are_repaired_in_the_sandbox(treegen: Command, walker: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = treegen(
        f"search repair -T level=easy -T problems=1 -M {walker} -n 2 -o {run}",
        "--allow-code-execution",
        *FEW,
    )
    assert done.code == 0, done.err
    (record,) = trees_of(run)
    assert set(record["scores"]) in ({"hidden_tests", "public_tests"}, set())
    again = treegen("search", "--resume", run)
    assert again.code == 0, again.err  # the finished run needs no permission
    lines = list(RecordFile(run / "actions.jsonl", writable=False).records())
    ends = [line["observation"] for line in lines if "begins" not in line]
    assert all(0 <= shown["reward"] < 1 for shown in ends) and ends


def test_a_finished_run_deletes_snapshots_that_a_killed_process_left(
    treegen: Command, walker: Path, tmp_path: Path
) -> None:
    run, allowed = tmp_path / "run", "--allow-code-execution"
    what = ["repair", "-T", "level=easy", "-T", "problems=1", "--environment", "local"]
    done = treegen("search", *what, "-M", walker, *FEW, "-n", "2", allowed, "-o", run)
    assert done.code == 0, done.err
    assert not (run / "worlds").exists()
    storage = Storage(run / "worlds", DirectorySize(10, 10_000), 100_000)
    snapshot = storage.save(storage.create_world(None))
    storage.close([snapshot])
    left = run / "worlds" / "snapshots" / snapshot
    again = treegen("search", "--resume", run)
    assert f"snapshots in {run / 'worlds'}; resume the run with {allowed} to delete" in again.err
    assert again.code == 0 and left.exists()
    (run / "worlds" / "mine.txt").write_text("not treegen's")
    again = treegen("search", "--resume", run, allowed)
    assert again.code == 0 and (run / "worlds" / "mine.txt").exists()
    (run / "worlds" / "mine.txt").unlink()
    again = treegen("search", "--resume", run, allowed)
    assert again.code == 0 and not list((run / "worlds").iterdir())
    again = treegen("search", "--resume", run)
    assert again.code == 0 and "snapshots" not in again.err
