"""What `treegen judge` and `eval --judge` refuse: in one line, and before a model is loaded."""

import json
from pathlib import Path

import pytest
from cli_cases import Command
from judging_cases import LETTERS, rubric_file, small_run

import treegen as library
from treegen.errors import InputError, ModelError
from treegen.evals.judging.judgement_files import FOLDER

REPEATED = ("--repeats", "3")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repeats", "0"), "--repeats must be at least 1, got 0"),
        (("--wordings", "0"), "--wordings must be at least 1, got 0"),
        (("--half-width", "-1"), "--half-width must be above 0"),
        (("--half-width", "nan"), "--half-width must be above 0"),
        ((*REPEATED, "--temperature", "-1"), "--temperature must be at least 0"),
        ((*REPEATED, "--max-tokens", "0"), "--max-tokens must be at least 1"),
        ((*REPEATED, "--seed", "-1"), "--seed must be in"),
        ((*REPEATED, "--temperature", "0"), "all repeats are the same; remove --repeats"),
        (("--temperature", "0"), "--temperature requires verdicts from samples"),
        (("--max-tokens", "9"), "--max-tokens requires verdicts from samples"),
        (("--stop-when", "decided"), "--stop-when has no effect with one repeat"),
        (("--weight", "2"), "--weight requires several judges"),
        (("--combine", "majority"), "--combine requires several judges"),
        (("--judge", "tiny", "--weight", "2"), "there are 1 weights for 2 judges"),
        (("--judge", "tiny", "--weight", "2", "--weight", "-1"), "must be above 0"),
        (("--judge", "none/at/all"), "'none/at/all' does not exist"),
        (("--judge", "demo"), "demo is named twice"),
        (("--pairs", "run"), "names a run twice"),
        (("--pairs", "none"), "there is no run directory none"),
        (("--labels", "others.jsonl"), "has no labels for the answers of this run"),
        (
            ("--labels", "bad.jsonl"),
            "bad.jsonl, line 1: the label must be one of correct, incorrect",
        ),
        (("--rubric", "pairwise", "--pairs", "b", "--labels", "others.jsonl"), "compares pairs"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
    treegen: Command,
    tiny: Path,
    no_weights: None,
    flags: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    small_run(tmp_path / "run", problems=2, samples=1)
    small_run(tmp_path / "b", problems=2, samples=1)
    label = {"problem_id": "another", "sample_index": 0, "label": "correct"}
    Path("others.jsonl").write_text(json.dumps(label))
    Path("bad.jsonl").write_text(json.dumps({**label, "label": "maybe"}))
    given = [str(tiny) if flag == "tiny" else flag for flag in flags]
    assert message in treegen("judge", "run", "--judge", "demo", *given).error
    assert not list(Path("run").glob(f"{FOLDER}/*/*.jsonl"))


def test_a_stored_judging_of_one_judge_has_no_jury(tmp_path: Path, treegen: Command) -> None:
    run = small_run(tmp_path / "run", problems=2, samples=1)
    assert treegen("judge", run, "--judge", "demo", "--memory", "32MiB").code == 0
    assert "requires several judges" in treegen("judge", run, "--weight", "2").error
    assert "requires several judges" in treegen("judge", run, "--combine", "majority").error


def test_verdicts_may_be_greedy(tmp_path: Path, treegen: Command) -> None:
    run, rubric = small_run(tmp_path / "run", problems=2, samples=1), rubric_file(tmp_path, LETTERS)
    found = treegen(
        f"judge {run} --judge demo --rubric {rubric} --temperature 0 --max-tokens 4 --memory 32MiB"
    ).document
    (name,) = found["summaries"][0]["judgings"]
    assert json.loads((run / FOLDER / name / "judging.json").read_text())["temperature"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--judge", "none/at/all"), "'none/at/all' does not exist"),
        (("--judge", "demo", "--judge", "demo"), "demo is named twice"),
        (("--judge", "demo", "--wordings", "9"), "--wordings 9 is more than the 3"),
        (("--judge", "demo", "--rubric", "pairwise"), "requires a second run"),
        (("--rubric", "rating"), "has no effect without --judge"),
    ],
)
def test_an_evaluation_is_not_begun_for_a_judge_that_cannot_be(
    tmp_path: Path, treegen: Command, no_weights: None, flags: tuple[str, ...], message: str
) -> None:
    run = tmp_path / "run"
    assert message in treegen("eval", "gsm8k", "--limit", "2", "-o", run, *flags).error
    assert not run.exists()


def test_evaluate_is_not_begun_either(tmp_path: Path, no_weights: None) -> None:
    how = {"limit": 2, "output": tmp_path / "run", "progress": False}
    with pytest.raises(ModelError, match="does not exist"):
        library.evaluate("gsm8k", "demo", judge="none/at/all", **how)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="named twice"):
        library.evaluate("gsm8k", "demo", judge=("demo", "demo"), **how)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
