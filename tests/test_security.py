"""SECURITY.md: each row of its tables is shown by tests, and these exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from cli_cases import Command
from judging_cases import rubric_file, small_run

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NESTED = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


def rows_of(repository: Path) -> list[list[str]]:
    """Return the cells of each row of the tables, without their heads."""
    page = (repository / ".github" / "SECURITY.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = [index for index, row in enumerate(rows) if set(row[0]) == {"-"}]
    return [row for index, row in enumerate(rows) if not {index, index + 1} & set(heads)]


def test_each_row_is_shown_by_tests_that_exist(repository: Path) -> None:
    rows = rows_of(repository)
    assert len(rows) > 30
    for *what, shown in rows:
        names = re.findall(r"`(tests/[^`]+)`", shown)
        assert names and re.sub(r"`tests/[^`]+`|<br>", "", shown) == "", what
        for name in names:
            file, _, function = name.partition("::")
            assert (repository / file).is_file(), f"{file}: {what}"
            if function:
                tree = ast.parse((repository / file).read_text(encoding="utf-8"))
                defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
                assert function in defined, f"{name}: {what}"


def test_templates_of_lm_eval_have_no_sandbox() -> None:
    """If that changes, the row of lm-eval's tasks is to change too."""
    utils = pytest.importorskip("lm_eval.utils")
    from jinja2.sandbox import SandboxedEnvironment

    assert not isinstance(utils.env, SandboxedEnvironment)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("template", [LOOP, NESTED], ids=["loop", "recursion"])
def test_a_foreign_rubric_never_hangs_a_command(
    treegen: Command, tmp_path: Path, template: str
) -> None:
    run = small_run(tmp_path / "run", problems=1, samples=1)
    judged = ["judge", run, "--judge", "demo", "--rubric", rubric_file(tmp_path)]
    done = treegen(*judged, "--memory", "32MiB")
    assert done.code == 0, done.err
    (info,) = run.glob("*/*/judging.json")
    document = json.loads(info.read_text())
    rubric = document["rubric"]
    rubric["wordings"] = [f"{wording}{template}" for wording in rubric["wordings"]]
    info.write_text(json.dumps(document))
    for words in (["show", run], ["report", run, "--no-plots"], ["judge", run]):
        done = treegen(*words)
        output = f"{done.out}{done.err}"
        assert "not a valid template" in output and "Traceback" not in output, words
