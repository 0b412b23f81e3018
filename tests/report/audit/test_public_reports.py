"""Defects that users of other tools have reported, each as a small imported run.

`public_reports.jsonl` has the address of each report, the finding that must be there, and samples
that show the defect in other words: [text, the answer that the tool read, its verdict].
"""

import json
from pathlib import Path
from typing import Any

import pytest
from audit_cases import import_run

from treegen.report.audit.audit import audit_run

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
