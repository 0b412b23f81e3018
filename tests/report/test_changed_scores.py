"""Runs whose samples give other scores than results.json: every reader says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from certified_run import certified as certified
from cli_cases import Command
from report_cases import make_run

from treegen import open_run
from treegen.report.changed_scores import (
    ChangedNotice,
    describe_changed_scores,
    list_changed_scores,
)
from treegen.report.load import load_run
from treegen.runs.record_format import encode_record

_WORDS = "the samples, the data or the code have changed since the run was scored"


@pytest.fixture
def forged(certified: Path, tmp_path: Path) -> Path:
    """A copy of the run in which all samples of a problem are right, with correct checksums."""
    shutil.copytree(certified / "run", run := tmp_path / "run")
    answers = {p.id: p.answer for p in load_run(run).problems}
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    wrong = {s.problem_id for s in load_run(run).samples if not _is_right(s)}
    forge = min(wrong)
    lines = []
    for record in records:
        del record["crc"]
        if record["problem_id"] == forge:
            record["text"] = f" The answer is {answers[forge]}."
        lines.append(encode_record(record))
    (run / "samples.jsonl").write_bytes(b"".join(lines))
    return run


def _is_right(sample: Any) -> bool:
    return bool(next(iter(sample.verdicts.values())).correct)


def _accuracies(run: Path) -> tuple[str, str]:
    """The accuracy in results.json, and that of the samples."""
    stored = json.loads((run / "results.json").read_text())["report"]["metrics"][0]["value"]
    now = open_run(run).accuracy
    assert now is not None
    return f"{stored:.3f}", f"{now:.3f}"


@pytest.mark.usefixtures("undrawn")
def test_readers_name_the_score_that_changed(
    forged: Path, certified: Path, tmp_path: Path, treegen: Command
) -> None:
    before, now = _accuracies(forged)
    assert before != now
    words = f"results.json has accuracy {before}, but the samples now give {now} ("
    for command in ("show", "report", "power"):
        done = treegen(command, *(["--run"] if command == "power" else []), forged)
        assert done.code == 0, done.err
        (line,) = (line for line in done.err.splitlines() if words in line)
        assert line.endswith(_WORDS)
    assert words in (forged / "report.html").read_text()
    page = tmp_path / "page.html"
    done = treegen("compare", certified / "run", forged, "--no-plots", "--html", page)
    (line,) = (line for line in done.out.splitlines() if words in line)
    assert line.startswith("B: ") and done.document["notices"] == [line]
    assert words in page.read_text()
    file = forged / "certificate.json"
    assert f"Warning: {file} does not belong to the present samples" in done.err
    assert f"treegen certify --check {file}" in done.err
    # After scoring, only the certificate is not that of the samples.
    assert treegen("score", forged).code == 0
    assert "results.json has" not in treegen("show", forged).err
    assert "does not belong" in treegen("compare", certified / "run", forged, "--no-plots").err


def test_certify_says_that_samples_may_be_changed(forged: Path, treegen: Command) -> None:
    before, now = _accuracies(forged)
    done = treegen("certify", forged)
    assert done.code == 2
    assert f"(accuracy {before}, now {now}); if neither the task, the data nor" in done.error
    assert f"{forged}/samples.jsonl has: compare it with a copy; otherwise run" in done.error
    done = treegen("certify", "--check", forged / "certificate.json")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert f"DOES NOT HOLD  accuracy: certified {before}, now {now}; " in lines["scores"]
    assert f"DOES NOT HOLD  accuracy: stored {before}, now {now}; " in lines["results.json"]
    assert lines["scores"].endswith(" more") and "samples_jsonl" in lines["samples"]
    (forged / "results.json").unlink()
    assert "results.json has no scores; run `treegen score" in treegen("certify", forged).error


def test_an_honest_run_has_no_notice(certified: Path, tmp_path: Path, treegen: Command) -> None:
    shutil.copytree(certified / "run", run := tmp_path / "run")
    for options in (("--pass-hat-k", "2"), ("--k", "1,3", "--maj", "1,5")):
        assert treegen("score", run, *options).code == 0
        assert treegen("show", run).err == ""
    done = treegen("compare", certified / "run", run, "--no-plots")
    assert done.err == "" and done.document["notices"] == []
    # results.json of a run that has more samples by now, or none.
    results = json.loads((run / "results.json").read_text())
    results["report"]["metrics"][0]["value"] = 0.123
    (run / "results.json").write_text(json.dumps({**results, "done": results["done"] - 1}))
    assert not load_run(run).notices
    (run / "results.json").write_text(json.dumps(results))
    (notice,) = load_run(run).notices
    assert isinstance(notice, ChangedNotice) and "accuracy 0.123, but" in notice
    assert "more scores" not in notice
    for content in ("[]", '{"done": 20, "report": []}', '{"done": 20, "report": {"metrics": 1}}'):
        (run / "results.json").write_text(content)
        assert not load_run(run).notices
    assert not load_run(make_run(tmp_path / "unscored")).notices


def test_names_of_changed_scores() -> None:
    def report(*values: Any, task: str = "a") -> dict[str, Any]:
        names = [("exact_match", "x"), ("pass@2", "x"), ("exact_match", "y")]
        rows = [
            {"task": task, "filter": filter, "metric": metric, "value": value}
            for (metric, filter), value in zip(names, values, strict=False)
        ]
        votes = [{"filter": "x", "k": 4, "value": values[-1]}]
        return {"metrics": rows, "majority": votes}

    first, second = report(0.5, 0.25, 0.1, 0.5), report(0.5, 0.75, None, 0.5000001)
    assert list_changed_scores(first, second) == [
        ("pass@2", "0.250", "0.750"),
        ("accuracy (y)", "0.100", "n/a"),
        ("maj@4", "0.500000000000", "0.500000100000"),
    ]
    (large,) = list_changed_scores(report(10**400), report(0.5))[:1]
    assert large[0] == "accuracy" and large[2] == "0.500"
    assert describe_changed_scores(first, second) == (
        "results.json has pass@2 0.250, but the samples now give 0.750 (2 more scores differ); "
        + _WORDS
    )
    assert describe_changed_scores(first, report(0.5 + 1e-12, 0.25, 0.1, 0.5)) == ""
    assert list_changed_scores(report(0.5), first) == []  # added metrics
    both = {"metrics": [*report(0.5)["metrics"], *report(0.4, task="b")["metrics"]]}
    other = {"metrics": [*report(0.5)["metrics"], *report(0.3, task="b")["metrics"]]}
    assert list_changed_scores(both, other) == [("b: accuracy", "0.400", "0.300")]
    contents: list[object] = [None, [], {"metrics": [1]}, {"metrics": [{"value": "x"}]}]
    for content in (*contents, {"majority": {}}):
        assert list_changed_scores(content, first) == []


def test_a_search_run_names_its_solved_searches(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    words = ["--model", "demo", "-L", "3", "--budget", "tokens=60", "-o", run, "-q"]
    assert treegen("search", "countdown", *words).code == 0
    assert not load_run(run).notices
    results = json.loads((run / "results.json").read_text())
    solved = results["num_solved"]
    (run / "results.json").write_text(json.dumps({**results, "num_solved": solved + 1}))
    (notice,) = load_run(run).notices
    text = f"results.json has {solved + 1} solved searches, but the trees have {solved}; {_WORDS}"
    assert notice == text
    assert text in treegen("show", run).err and f"A: {text}" in treegen("compare", run, run).out
