"""Hostile programs, on every tier that this machine has, as root and as somebody else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_cases import judge_all, left_since, load_cases, python_for_everybody, traces

from treegen.tasks.sandbox import ProgramResult
from treegen.tasks.sandbox.isolation import TIERS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
    pytest.mark.usefixtures("only_judge"),
]

CASES = load_cases()
SANDBOXES = ("bubblewrap", "landlock")
# Waiting is the same for everybody, and takes long.
QUICK = [name for name in CASES if not name.startswith(("spin", "sleep", "stop", "deadlock"))]
UNPRIVILEGED = """
import json, os, sys
os.setgroups([])
os.setresgid(65432, 65432, 65432)
os.setresuid(65432, 65432, 65432)
sys.path[:0] = json.loads(sys.argv[1])
from hostile_cases import judge_all, load_cases
cases = load_cases()
results = judge_all(sys.argv[2], {name: cases[name] for name in json.loads(sys.argv[3])})
print(json.dumps({name: [t.verdict for t in r.tests] for name, r in results.items()}))
"""


@pytest.fixture(scope="module")
def results(only_judge: None) -> dict[str, dict[str, ProgramResult]]:
    """What every usable sandbox says of every program, after which no trace is left."""
    found: dict[str, dict[str, ProgramResult]] = {}
    for sandbox in SANDBOXES:
        if not TIERS[sandbox].unavailable():
            before = traces()
            found[sandbox] = judge_all(sandbox, CASES)
            assert left_since(before) == set()
    return found


def test_the_set_is_large_enough() -> None:
    honest = [name for name in CASES if name.startswith("honest_")]
    assert len(honest) >= 20
    assert len(CASES) - len(honest) >= 40


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("name", list(CASES))
def test_verdict(results: dict[str, dict[str, ProgramResult]], name: str, sandbox: str) -> None:
    if sandbox not in results:
        pytest.skip(TIERS[sandbox].unavailable())
    (result,) = results[sandbox][name].tests
    assert result.verdict in CASES[name].expect, result


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_as_an_unprivileged_user(sandbox: str, repository: Path) -> None:
    if TIERS[sandbox].unavailable():
        pytest.skip(TIERS[sandbox].unavailable())
    python = python_for_everybody()
    before = traces()
    with readable_copy(repository) as folder:
        done = subprocess.run(
            [python, "-c", UNPRIVILEGED, json.dumps([folder]), sandbox, json.dumps(QUICK)],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"]},  # no PYTHONPATH to this checkout
        )
    if "no sandbox works here" in done.stderr and sandbox == "bubblewrap":
        pytest.skip("user namespaces are switched off here")
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    wrong = {name: found for name, found in verdicts.items() if found[0] not in CASES[name].expect}
    assert wrong == {}
    assert left_since(before) == set()


@contextlib.contextmanager
def readable_copy(repository: Path) -> Iterator[str]:
    """What the judge's tests need, where other users can read it."""
    folder = Path(tempfile.mkdtemp(prefix="judge-tests-"))
    try:
        shutil.copytree(repository / "tests" / "hostile", folder / "hostile")
        shutil.copy(repository / "tests" / "hostile_cases.py", folder)
        (folder / "treegen" / "tasks").mkdir(parents=True)
        shutil.copy(repository / "treegen" / "errors.py", folder / "treegen")
        shutil.copytree(repository / "treegen" / "common", folder / "treegen" / "common")
        shutil.copytree(repository / "treegen" / "runs", folder / "treegen" / "runs")
        shutil.copytree(repository / "tasks" / "sandbox", folder / "treegen" / "tasks" / "sandbox")
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        yield str(folder)
    finally:
        shutil.rmtree(folder)
