"""Runs of lm-eval's tasks, once drawn: exported, judged, reported, compared, drawn by workers."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_cases import assert_same_samples, build_checkpoint, samples_of
from click.testing import CliRunner
from lm_eval_kinds import folder as folder

pytest.importorskip("lm_eval", "0.4")


import treegen
from treegen import LLM, Cluster
from treegen.api.run import Run
from treegen.cli.main import cli
from treegen.report.exchange import FORMATS, export_run, import_log
from treegen.report.load import load_run

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), context=1024)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), check=False, **OPTIONS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def drawn(folder: Path, llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four problems with three samples each."""
    return treegen.evaluate(
        "lm-eval:local_mmlu_pro",
        llm,
        output=tmp_path_factory.mktemp("runs") / "drawn",
        include_path=folder,
        num_samples=3,
        temperature=1.0,
        max_tokens=8,
        progress=False,
    )


@pytest.fixture(scope="module")
def likely(folder: Path, llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four problems whose choices are scored."""
    return treegen.evaluate(
        "lm-eval:local_arc_easy",
        llm,
        output=tmp_path_factory.mktemp("runs") / "likely",
        include_path=folder,
        progress=False,
    )


@pytest.mark.parametrize("kind", ["drawn", "likely"])
@pytest.mark.parametrize("to", FORMATS)
def test_each_format_has_every_sample(
    to: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Run = request.getfixturevalue(kind)
    target = tmp_path / ("out.eval" if to == "inspect" else "out")
    files = export_run(run.path, to, target, allow_task_code=True)
    records = samples_of(run.path)
    assert run.view.report is not None
    if to == "parquet":
        pandas = pytest.importorskip("pandas")
        tables = {file.stem: pandas.read_parquet(file) for file in files}
        assert len(tables["samples"]) == len(records)
        assert set(tables["metrics"].metric) >= {row.metric for row in run.view.report.metrics}
        return
    if to == "every-eval-ever":
        lines = [json.loads(line) for line in files[1].read_text().splitlines()]
        assert {line["sample_id"] for line in lines} == {each["problem_id"] for each in records}
        return
    rows = [row for row in run.view.report.metrics if row.filter in run.view.filters]
    expected = {(row.filter, row.metric): row.value for row in rows}
    found: dict[tuple[str, str], float | None] = {}
    if to == "inspect":
        log = pytest.importorskip("inspect_ai.log").read_eval_log(str(files[0]))
        for scorer in log.results.scores:
            found |= {(scorer.name, name): each.value for name, each in scorer.metrics.items()}
    else:
        (of_task,) = json.loads(files[0].read_text())["results"].values()
        for key, value in of_task.items():
            metric, _, how = key.partition(",")
            found[how, metric] = value
    assert {key: found.get(key) for key in expected} == expected
    (back,) = import_log(files[0], tmp_path / "back")
    texts = {(each["problem_id"], each["sample_index"]): each["text"] for each in records}
    assert {(each.problem_id, each.index): each.text for each in load_run(back).samples} == texts


def test_a_judge_reads_question_reference_and_answer(drawn: Run, llm: LLM) -> None:
    found = treegen.judge(
        drawn.path, "correctness", llm, wordings=1, progress=False, allow_task_code=True
    )
    assert found.done == found.planned == 12
    (summary,) = found.summaries
    assert summary.mean is not None and set(summary.by_problem) == {
        each["problem_id"] for each in samples_of(drawn.path)
    }


def test_reports_scores_and_comparisons_need_no_model(
    drawn: Run, likely: Run, tmp_path: Path
) -> None:
    for run in (drawn, likely):
        before = json.loads((run.path / "results.json").read_text())["report"]
        for command in (
            ["score", str(run.path), "--quiet"],
            ["report", str(run.path), "-o", str(tmp_path / "page.html"), "--no-plots"],
            ["compare", str(run.path), str(run.path), "--no-plots"],
        ):
            done = CliRunner().invoke(cli, [*command, "--allow-task-code"])
            assert done.exit_code == 0, done.output
        assert json.loads((run.path / "results.json").read_text())["report"] == before
        assert "lm-eval:local" in (tmp_path / "page.html").read_text()


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_workers_draw_the_samples_of_one_engine(
    drawn: Run, likely: Run, folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with Cluster(str(checkpoint), workers=2, memory="64MiB", dtype="float32") as cluster:
        run = treegen.evaluate(
            "lm-eval:local_mmlu_pro",
            cluster,
            output=tmp_path / "drawn",
            include_path=folder,
            num_samples=3,
            temperature=1.0,
            max_tokens=8,
            progress=False,
        )
        assert_same_samples(run.path, drawn.path)
        assert run.results["report"] == drawn.results["report"]
        run = treegen.evaluate(
            "lm-eval:local_arc_easy",
            cluster,
            output=tmp_path / "likely",
            include_path=folder,
            progress=False,
        )
        for actual, other in zip(samples_of(run.path), samples_of(likely.path), strict=True):
            assert actual["problem_id"] == other["problem_id"]
            assert actual["choice_logprobs"] == pytest.approx(other["choice_logprobs"], abs=1e-5)
