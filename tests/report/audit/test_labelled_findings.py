"""Findings of high and medium severity, each labelled right or wrong by reading its samples.

`labelled_findings.jsonl` has one line for each run. Runs with source "demo" are drawn and audited
again here: 3 problems that come with treegen, 2 samples of at most 48 tokens. The others are
published outputs of models, which do not come with treegen; "source" is their repository on GitHub.
"read" is the number of samples or problems of a finding that were read, "wrong" how many of these
do not have the defect that the finding names.

`public_reports.jsonl` has defects that users of other tools have reported: the address of each
report, the finding that must be there, and samples that show the defect in other words: [text, the
answer that the tool read, its verdict].
"""

import json
from pathlib import Path
from typing import Any

import pytest
from audit_cases import import_run

from treegen import evaluate
from treegen.report.audit.audit import audit_run

_RUNS: list[dict[str, Any]] = [
    json.loads(line)
    for line in Path(__file__).with_name("labelled_findings.jsonl").read_text().splitlines()
]
_ALWAYS = ("arc-easy", "gpqa", "gsm8k")  # without findings, and with three kinds
_DEMO = {run["run"]: run for run in _RUNS if run["source"] == "demo"}


def test_at_most_one_percent_of_severe_findings_is_wrong() -> None:
    findings = [finding for run in _RUNS for finding in run["findings"].values()]
    assert all(0 < finding["read"] <= finding["cases"] for finding in findings)
    assert len(_RUNS) >= 10 and sum(finding["read"] for finding in findings) >= 100
    assert sum(f["wrong"] for f in findings) <= 0.01 * sum(f["read"] for f in findings)


@pytest.mark.parametrize(
    "task",
    [
        task
        if task in ("arc-easy", "gpqa", "gsm8k")
        else pytest.param(task, marks=pytest.mark.soak)
        for task in _DEMO
    ],
)
def test_findings_on_bundled_problems_are_the_labelled_ones(task: str, tmp_path: Path) -> None:
    draws: dict[str, Any] = {} if task == "arc-easy" else {"num_samples": 2, "max_tokens": 48}
    run = evaluate(
        task, "demo", eager=True, output=tmp_path / "run", limit=3, progress=False, **draws
    )
    audit = run.audit()
    severe = {
        finding.kind: finding.count for finding in audit.findings if finding.severity != "low"
    }
    assert audit.num_samples == _DEMO[task]["samples"]
    assert severe == {kind: f["cases"] for kind, f in _DEMO[task]["findings"].items()}


# Reports of users of other tools, each as a small imported run


_CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("public_reports.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", _CASES, ids=[case["url"][19:] for case in _CASES])
def test_the_audit_finds_what_was_reported(case: dict[str, Any], tmp_path: Path) -> None:
    names = ("prompt", "finish", "model", "num_fewshot")
    more = {name: case[name] for name in names if name in case}
    copies = 2 if case.get("twice") else 1
    problems = [(case["question"], case["gold"])] * copies
    audit = audit_run(import_run(tmp_path, problems, [case["samples"]] * copies, **more))
    severity = {finding.kind: finding.severity for finding in audit.findings}
    assert severity.get(case["finding"]) in ("high", "medium"), str(audit)


def test_there_are_enough_reports() -> None:
    assert len({case["url"] for case in _CASES}) == len(_CASES) > 40
