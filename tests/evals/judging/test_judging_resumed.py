"""A run that was to be judged is judged when it is resumed, however it was stopped."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from judging_cases import LETTERS, rubric_file, small_run

import treegen as library
from treegen.errors import InputError, TreegenError
from treegen.evals.judging.judgement_files import FILE, FOLDER
from treegen.evals.pipeline import evaluation
from treegen.llm import LLM

EVAL = "eval gsm8k --limit 3 -n 2 --model demo --max-tokens 8 --memory 32MiB"
PYTHON: dict[str, Any] = {
    "limit": 2,
    "num_samples": 1,
    "max_tokens": 6,
    "memory": "32MiB",
    "progress": False,
}


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the next evaluation once its runs are begun, as Ctrl-C does."""

    def stop(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "restore_rounds", stop)


def free(run: Path) -> dict[str, Any]:
    info = json.loads((run / "run.json").read_text())
    found: dict[str, Any] = (info["resumes"] or [info["settings"]])[-1]["free"]
    return found


def test_a_resumed_run_is_judged_as_it_was_begun(
    tmp_path: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    rubric = rubric_file(tmp_path, LETTERS)
    run, whole = tmp_path / "run", tmp_path / "whole"
    how = ("--judge", "demo", "--rubric", rubric, "--wordings", "1", "--verdicts", "samples")
    treegen(EVAL, "-o", whole, *how)
    interrupt(monkeypatch)
    assert treegen(EVAL, "-o", run, *how).code != 0
    assert not (run / FOLDER).exists()
    rubric.unlink()  # the run has kept what was in it
    found = treegen("eval", "--resume", run).document["runs"][0]["judged"]
    assert found["done"] == found["planned"] == 6
    # What stands around answers in a prompt is a run's own, so verdicts may differ.
    resumed, other = (
        library.judgings(each).summaries[0].judged[0].judging for each in (run, whole)
    )
    assert (resumed.settings, resumed.fingerprint) == (other.settings, other.fingerprint)
    again = treegen("eval", "--resume", run).document["runs"][0]["judged"]
    assert again["summaries"] == found["summaries"]
    assert next(iter(again["work"].values()))["decoded_tokens"] == 0  # nothing is judged twice


def test_another_judge_or_none_takes_its_place(
    tmp_path: Path, treegen: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    interrupt(monkeypatch)
    treegen(EVAL, "-o", run, "--judge", "demo")
    treegen("eval", "--resume", run, "--judge", tiny, "--wordings", "1")
    assert free(run)["judged_by"]["judge"] == [str(tiny)]
    (folder,) = (run / FOLDER).iterdir()
    assert tiny.name in folder.name
    document = treegen("eval", "--resume", run, "--judge", "none").document
    assert "judged" not in document["runs"][0]
    assert free(run)["judged_by"] is None
    done = treegen("eval", "--resume", run, "--judge", "none", "--judge", "demo")
    assert done.code == 2 and "--judge" in done.err


def test_all_tasks_of_a_command_are_judged(
    tmp_path: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "What is 2 + 2?", "answer": "4", "problem": "2 + 2?"}\n')
    runs = tmp_path / "runs"
    interrupt(monkeypatch)
    treegen(
        f"eval jsonl simpleqa --data {data} --model demo --memory 32MiB --max-tokens 6"
        f" -o {runs} --judge demo --rubric rating --wordings 1"
    )
    document = treegen("eval", "--resume", runs).document
    assert [run["judged"]["done"] for run in document["runs"]] == [1, 1]


def test_what_a_run_remembers_trusts_no_code_and_is_checked_first(
    tmp_path: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch, no_weights: None
) -> None:
    run = tmp_path / "run"
    interrupt(monkeypatch)
    treegen(f"{EVAL} -o {run} --judge demo --max-rows 4 --trust-remote-code")
    assert free(run)["judged_by"]["options"] == {"memory": "32MiB", "max_rows": 4}
    info = json.loads((run / "run.json").read_text())
    for kept, message in (
        ({"judge": ["none/at/all"]}, "judges none/at/all cannot be used: .*--judge none"),
        ({"judge": "demo"}, "corrupt"),
        ({"judge": ["demo"], "rubric": 5}, "corrupt"),
        ({"judge": ["demo"], "rubric": "/dev/zero.yaml"}, "corrupt"),
        ({"judge": ["demo"], "wordings": 99}, "wordings"),
        ("demo", "judged_by"),
    ):
        info["settings"]["free"]["judged_by"] = kept
        (run / "run.json").write_text(json.dumps(info))
        done = treegen("eval", "--resume", run)
        assert done.code == 2, done.err
        assert re.search(message, done.err), done.err


def test_python_resumes_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with LLM("demo", device="cpu", memory="32MiB") as judge:
        interrupt(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            library.evaluate("gsm8k", "demo", output=run, judge=judge, rubric="rating", **PYTHON)
    library.evaluate(resume=run, progress=False)
    found = library.judgings(run)
    assert found.summaries[0].judged[0].judging.settings.rubric.name == "rating"
    assert found.done == found.planned == 6
    library.evaluate(resume=run, judge="none", progress=False)
    assert free(run)["judged_by"] is None
    with pytest.raises(InputError, match="skips judging"):
        library.evaluate(resume=run, judge=["none", "demo"], progress=False)
    with pytest.raises(TreegenError, match="has no effect without judge="):
        library.evaluate(resume=run, rubric="rating", progress=False)


def test_a_judging_that_was_killed_says_what_lacks(tmp_path: Path, treegen: Command) -> None:
    run, rubric = small_run(tmp_path / "run", problems=2), rubric_file(tmp_path, LETTERS)
    command = shlex.split(
        f"judge {run} --judge demo --rubric {rubric} --repeats 2 --max-tokens 8"
        " --memory 16MiB --max-rows 1"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "treegen", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (files := [*run.glob(f"{FOLDER}/*/{FILE}")]) or not files[0].stat().st_size:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = treegen("judge", run)
    assert done.code == 1
    assert 0 < done.document["done"] < done.document["planned"] == 2 * 3 * 2 * 2
    added = done.err.split(" judgements are missing; to add them, run: treegen ")[1].strip()
    for view in (treegen("show", run).err, str(library.judgings(run).describe_missing())):
        assert added.split(" --rubric")[0] in view
    words = shlex.split(added)
    place = words.index("--rubric") + 1
    assert words[place] == "FILE_OF_letters"
    words[place] = str(command[command.index("--rubric") + 1])
    treegen(*words, "--memory", "16MiB", "--max-rows", "1")
    assert treegen("judge", run).document["done"] == 2 * 3 * 2 * 2
