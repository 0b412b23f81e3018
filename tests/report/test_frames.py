"""A run as pandas frames."""

import sys
from pathlib import Path

import pytest
from report_cases import make_run, make_search_run, make_timeline, make_trees

from treegen.api.run import open_run
from treegen.errors import InputError, RunError
from treegen.report.load import load_run

pytest.importorskip("pandas")


def test_samples_have_their_records_and_verdicts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=6, num_samples=4)
    run, view = open_run(path), load_run(path)
    frame = run.samples()
    assert len(frame) == 24
    assert frame["text"].tolist() == [sample.text for sample in view.samples]
    assert {"num_tokens", "logprob", "finish_reason", "prompt_tokens", "time"} <= set(frame)
    assert view.report is not None
    assert frame.groupby("problem_id")["correct"].mean().mean() == pytest.approx(
        view.report.value("exact_match", "numeric")
    )
    assert (frame["correct"] == frame["numeric.correct"]).all()
    answers = [(s.verdicts or {})["strict-match"].answer for s in view.samples]
    assert (
        frame["strict-match.answer"].where(frame["strict-match.answer"].notna(), None).tolist()
        == answers
    )
    problems = run.problems()
    assert problems["problem_id"].tolist() == [f"p{i}" for i in range(6)]
    assert problems["accuracy"].mean() == pytest.approx(frame["correct"].mean())
    assert {"question", "reference", "top_share", "vote"} <= set(problems)
    metrics = run.metrics().set_index(["filter", "metric"])["value"]
    assert metrics["numeric", "maj@4"] == pytest.approx(problems["vote"].mean())
    assert run.nodes().empty and "problem_id" in run.nodes()
    assert run.progress().empty


def test_searches_and_their_nodes(tmp_path: Path) -> None:
    path = make_search_run(tmp_path / "run", num_problems=5)
    run = open_run(path)
    frame = run.samples()
    assert frame["solved"].mean() == pytest.approx(run.problems()["accuracy"].mean())
    assert "usage.tokens_decoded" in frame and "nodes" not in frame
    nodes = run.nodes()
    assert len(nodes) == 5 * 21 and nodes.groupby("problem_id")["n_tokens"].sum().tolist() == (
        frame.set_index("problem_id")["usage.tokens_decoded"].sort_index().tolist()
    )
    assert run.view.searched


def test_a_run_under_way_without_its_problems(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=3, num_samples=2, done=[2, 1, 0])
    make_timeline(path)
    make_trees(path, num_trees=1)
    with (path / "samples.jsonl").open("ab") as file:
        file.write(b'{"problem_id":"p2","sam')
    (tmp_path / "run-data.jsonl").unlink()
    run = open_run(path)
    assert len(run.samples()) == 3 and "correct" not in run.samples()
    assert run.problems()["num_samples"].tolist() == [2, 1, 0]
    assert len(run.progress()) == 80 and len(run.nodes()) == 21
    assert not (path / "run.lock").exists() or not (path / "run.lock").read_bytes()


def test_frames_that_cannot_be_loaded_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="there is no run directory"):
        open_run(tmp_path / "gone")
    run = open_run(make_run(tmp_path / "run", num_problems=2, num_samples=1))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"pip install '\.\[pandas\]'"):
        run.samples()
