"""The repair puzzle in worlds of files: in the sandboxes of treegen, Inspect and E2B."""

import os
from pathlib import Path
from typing import Any

import pytest
from agent_runs import load_job, mender, run_job
from e2b_cases import Cloud
from e2b_cases import cloud as cloud

from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.runs import RecordFile

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    names = ("solved", "scores", "nodes", "best")
    records = RecordFile(path / "trees.jsonl", writable=False).records()
    return {record["problem_id"]: {name: record[name] for name in names} for record in records}


@pytest.mark.parametrize("name", ["local", "inspect:local", "e2b"])
def test_hidden_tests_decide_wherever_the_files_are(
    cloud: Cloud, tmp_path: Path, name: str
) -> None:
    execution = ExecutionOptions(sandbox="none" if name == "inspect:local" else "auto")
    if name == "inspect:local":
        pytest.importorskip("inspect_ai")
    run = tmp_path / "run"
    job = load_job(
        "repair",
        "beam",
        extra={"problems": "1", "level": "medium"},
        environment=name,
        width=1,
        expand=2,
        depth=12,
        temperature=0.7,
    )
    run_job(job, mender(0.0), run, execution=execution)
    records = records_of(run)
    (record,) = records.values()
    assert record["solved"] and record["scores"] == {"hidden_tests": 1.0, "public_tests": 1.0}
    rewards = [node["data"]["reward"] for node in record["nodes"] if node.get("data")]
    assert 1.0 in rewards and min(rewards) < 1.0
    assert not cloud.sandboxes and list(cloud.templates) == ["base"]
    stored = (run / "actions.jsonl").read_bytes()
    os.truncate(run / "trees.jsonl", 0)
    cloud.requests.clear()
    with pytest.warns(RuntimeWarning, match="runs stored actions again"):  # snapshots are deleted
        run_job(job, mender(0.0), run, execution=execution, resume=True)
    assert records_of(run) == records and (run / "actions.jsonl").read_bytes() == stored


def test_a_missing_file_fails_its_tests(tmp_path: Path) -> None:
    job = load_job(
        "repair",
        "sample",
        extra={"problems": "1", "level": "easy"},
        environment="local",
        depth=3,
        temperature=0.7,
    )
    call = '<tool_call>\n{"name": "python", "arguments": {"code": ' + (
        '"import os\\n[os.remove(n) for n in os.listdir()]"}}\n</tool_call>'
    )

    def remove(problem: object, context: str, seed: int) -> str:
        return "Done." if "<tool_response>" in context else call

    run_job(job, remove, tmp_path / "run", execution=ExecutionOptions())
    (record,) = records_of(tmp_path / "run").values()
    assert not record["solved"]
    assert record["scores"] == {"hidden_tests": 0.0, "public_tests": 0.0}
