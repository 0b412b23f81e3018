"""Small imported runs for tests of the audit."""

from pathlib import Path
from typing import Any

from treegen.report.audit.audit import audit_run
from treegen.report.audit.findings import Audit
from treegen.report.exchange.external_log import ExternalLog, make_runs


def audit_case(case: dict[str, Any], folder: Path) -> Audit:
    """Return the audit of a run with one problem, or with two equal ones."""
    ids = ["1", "2"] if case.get("twice") else ["1"]
    problem = {"question": case["question"], "answer": case["gold"]}
    log = {
        "task": "reported",
        "version": "1",
        "model": case.get("model", "some/model"),
        "source": "a report",
        "problems": tuple({"id": i, "prompt": case.get("prompt", ""), **problem} for i in ids),
        "filters": ("score",),
        "num_samples": len(case["samples"]),
        "num_fewshot": case.get("num_fewshot", 0),
        "samples": tuple(
            {
                "problem_id": problem_id,
                "index": index,
                "text": text,
                "num_tokens": len(text.split()),
                "finish_reason": case.get("finish", "stop"),
                "verdicts": {"score": {"answer": answer, "correct": correct}},
            }
            for problem_id in ids
            for index, (text, answer, correct) in enumerate(case["samples"])
        ),
    }
    (run,) = make_runs([ExternalLog.model_validate(log)], folder / "run")
    return audit_run(run)
