"""Reference solutions that the audit runs, and problems that were published under another name."""

import gzip
import json
from pathlib import Path

from audit_cases import import_run
from cli_cases import Command

from treegen.report.audit.audit import audit_run


def _problems(repository: Path) -> list[dict[str, str]]:
    with gzip.open(repository / "tasks" / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(3), strict=False)]


def test_a_rejected_solution_is_found(repository: Path, tmp_path: Path, treegen: Command) -> None:
    rows = _problems(repository)
    rows[1]["canonical_solution"] = "    return []\n"
    del rows[2]["canonical_solution"]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for form in ("completion", "chat"):
        run = tmp_path / form
        words = ["-M", "demo", "--data", data, "--max-tokens", "4", "-n", "1"]
        done = treegen("eval", "humaneval", *words, "--task-arg", f"form={form}", "-o", run)
        assert "3/3 samples" in done.err
        done = treegen("audit", run)
        assert "2 reference solutions were not run; run them: treegen audit" in done.out, done.out
        done = treegen("audit", run, "--allow-code-execution", "--fail-on", "high")
        assert done.code == 1 and "HIGH reference-rejected: 1 of 2 problems" in done.out, done.out
        assert "example: problem HumanEval/1:" in done.out
    done = treegen("audit", run, "--sandbox", "none")
    assert done.code == 2 and "--allow-code-execution" in done.err


def test_published_problems_under_another_name_are_found(repository: Path, tmp_path: Path) -> None:
    question = f"  {_problems(repository)[0]['prompt'].upper()}"
    for task, want in (("my-code", 1), ("openai_humaneval", 0)):
        problems = [(question, "7"), ("How many apples are left?", "7")]
        samples = [[("The answer is 7.", "7", True)]] * 2
        run = import_run(tmp_path / task, problems, samples, task=task)
        found = [f for f in audit_run(run).findings if f.kind == "published-elsewhere"]
        assert len(found) == want
    assert all(f.severity == "low" and f.count == 1 for f in found)
