"""Runs from elsewhere with well-formed files that lie: each is audited, or an error in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from audit_cases import import_run

from treegen.errors import TreegenError
from treegen.report.audit.audit import audit_run
from treegen.runs.settings import _comparable_fields, _fingerprint

_DEEP: Any = {}
for _ in range(300):
    _DEEP = {"a": _DEEP}
_LIES: list[Any] = ["x", True, -1, 10**400, 1e308, [], [None], {}, _DEEP, "\ud800", "../../etc"]


def _change(value: Any, at: str, lie: Any) -> None:
    *above, last = at.split(".")
    for name in above:
        value = value.setdefault(name, {})
    value[last] = lie


@pytest.mark.parametrize(
    "at",
    [
        "planned",
        "settings.identity.sampling",
        "settings.identity.sampling.temperature",
        "settings.identity.sampling.stop",
        "settings.identity.prompt",
        "settings.identity.prompt.system_instruction",
        "settings.identity.data",
        "settings.identity.task",
        "settings.identity.imported",
        "settings.free.model",
        "settings.free.extra",
    ],
)
def test_lies_in_the_settings(tmp_path: Path, at: str) -> None:
    """The fingerprint of the settings is right, as whoever writes a run can compute it."""
    texts = [("The answer is 18.</think> The answer is 17.", "17", False)] * 3
    run = import_run(tmp_path, [("How many?", "18")], [texts])
    honest = json.loads((run / "run.json").read_text())
    for lie in _LIES:
        content = json.loads(json.dumps(honest))
        _change(content, at, lie)
        identity = content["settings"]["identity"]
        fields = _comparable_fields(identity, content["problem_ids"], content["planned"])
        content["fingerprint"] = _fingerprint(fields)
        (run / "run.json").write_text(json.dumps(content))
        try:
            audit_run(run)
        except TreegenError as error:
            text = str(error)
            assert "\n" not in text and "please report" not in text and len(text) < 1500


@pytest.mark.parametrize("lie", [10**18, -5, "x", None, [], True, 2.5])
def test_lies_in_the_results(tmp_path: Path, lie: Any) -> None:
    run = import_run(tmp_path, [("How many?", "18")], [[("The answer is 18.", "18", True)]])
    (run / "results.json").write_text(json.dumps({"shortened": lie, "report": lie}))
    found = [f for f in audit_run(run).findings if f.kind == "prompt-shortened"]
    assert all(finding.count <= 1 for finding in found)
