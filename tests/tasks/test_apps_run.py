"""Judging the samples of APPS runs: in the background, again, in part, and without permission."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, results_of, write_jsonl

from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import run_settings
from treegen.evals.job import Job, load_job
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.scoring.results import write_results
from treegen.runs import RecordFile, RunDir
from treegen.tasks.apps.compare import Comparer
from treegen.tasks.apps.task import APPS
from treegen.tasks.programs.scoring import SandboxScoring

ALLOW = "--allow-code-execution"
TESTS = {"inputs": ["1 2\n", "5 5\n", "3 3\n"], "outputs": ["3\n", "10\n", "6\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"
ADD_INDENTED = ADD.replace("\n", "\n    ")
# Programs and what becomes of their tests.
KINDS = {
    ADD: ("accepted", "AAA"),
    f"def main():\n    {ADD_INDENTED}\nif __name__ == '__main__':\n    main()": ("accepted", "AAA"),
    "print(3)": ("wrong_answer", "AWW"),
    "print(sqrt(9) if input() == '1 2' else 1 // 0)": ("runtime_error", "ARR"),
    "print(": ("compile_error", "CCC"),
    "while True: pass": ("timeout", "TT-"),
    "x = [0] * 10 ** 9": ("memory_limit", "MMM"),
    "print('x' * 10 ** 7)": ("output_limit", "OOO"),
    " \n": ("no_program", ""),
    "print(np.sum([int(x) for x in input().split()]))\nreturn": ("accepted", "AAA"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems that are solved by the same programs."""
    rows = [
        {
            "problem_id": number,
            "question": f"Add two numbers, form {number}.",
            "input_output": json.dumps(TESTS),
            "difficulty": difficulty,
        }
        for number, difficulty in enumerate(("introductory", "competition"))
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "apps.jsonl", rows)


@pytest.fixture
def make_run(data: Path, tmp_path: Path) -> Callable[..., tuple[Job, Path]]:
    """Return a function that writes a run with the given samples of the first problem."""

    def make(texts: list[str], **extra: str) -> tuple[Job, Path]:
        extra = {"timeout": "0.3", "memory": "400MiB", **extra}
        job = load_job(
            resolve_eval_settings(
                {
                    "task": "apps",
                    "data": str(data),
                    "model": "none",
                    "num_samples": len(texts),
                    "extra": extra,
                    "ids": ["0000"],
                }
            )
        )
        settings = run_settings(job, dtype="float32", fingerprint="none")
        with RunDir.create(tmp_path / "run", settings) as run:
            for index, text in enumerate(texts):
                run.append(
                    {
                        "problem_id": "0000",
                        "sample_index": index,
                        "text": text,
                        "num_tokens": 1,
                        "prompt_tokens": 1,
                        "finish_reason": "stop",
                    }
                )
        return job, tmp_path / "run"

    return make


MakeRun = Callable[..., tuple[Job, Path]]


def verdicts_of(path: Path) -> dict[int, dict[str, Any]]:
    """Return the stored verdicts of a run with one problem, by sample."""
    (file,) = path.glob("verdicts-*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({record["sample_index"] for record in records}) == len(records)
    return {record["sample_index"]: record for record in records}


def metrics_of(path: Path) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in results_of(path)["report"]["metrics"]}


def test_every_outcome_is_counted_once(make_run: MakeRun, treegen: Command) -> None:
    _, path = make_run(list(KINDS))
    assert treegen("score", path).error.endswith(f"allow it with {ALLOW}")
    done = treegen("score", path, ALLOW, "--k", "1,5")
    assert done.code == 0, done.err
    found = verdicts_of(path)
    assert {text: (found[i]["verdict"], found[i]["tests"]) for i, text in enumerate(KINDS)} == KINDS
    metrics = metrics_of(path)
    assert metrics.pop("strict_accuracy") == pytest.approx(0.3)
    assert metrics.pop("pass@1") == pytest.approx(0.3)
    assert metrics.pop("pass@5") == pytest.approx(1 - 21 / 252)
    assert metrics.pop("test_case_average") == pytest.approx((3 + 2 / 3) / 10)
    assert metrics.pop("truncated") == 0
    failures = {verdict for verdict, _ in KINDS.values()} - {"accepted"}
    assert metrics == dict.fromkeys(failures, 0.1)
    (document,) = done.document["runs"]
    assert document["judging"]["judged"] == 10 and document["judging"]["judge_errors"] == 0
    assert document["judging"]["sandbox"] != ["none"]
    titles = [table["title"] for table in document["report"]["tables"]]
    assert titles == ["strict accuracy by difficulty", "test-case average by difficulty"]
    assert document["report"]["tables"][0]["rows"][0][:3] == ["introductory", 1, 0.3]


def test_judging_goes_on_where_it_stopped(make_run: MakeRun, treegen: Command) -> None:
    job, path = make_run([ADD, "print(3)", "print(4)"])
    assert isinstance(job.task, APPS)
    with RunDir.open(path) as run:
        judging = job.task.open_scoring(run, ExecutionOptions())
        for record in run.records():
            judging.add(record)
        assert len(list(judging.finish(lambda: True))) == 0
        judging.close()
    assert treegen("score", path, ALLOW).code == 0
    whole = (path / "results.json").read_text()
    (file,) = path.glob("verdicts-*.jsonl")
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(lines[0] + b"\n" + lines[1][:20])
    assert treegen("score", path, ALLOW).code == 0
    assert len(verdicts_of(path)) == 3
    assert (path / "results.json").read_text() == whole


def test_stored_verdicts_stand_until_judged_anew(make_run: MakeRun, treegen: Command) -> None:
    _, path = make_run([ADD, "print(3)"])
    assert treegen("score", path, ALLOW).code == 0
    (file,) = path.glob("verdicts-*.jsonl")
    false = verdicts_of(path)[0] | {"verdict": "wrong_answer", "tests": "WWW"}
    del false["crc"]
    file.write_bytes(b"")
    stored = RecordFile(file, writable=True)
    stored.append(false)
    stored.close()
    assert treegen("score", path, ALLOW).code == 0
    assert metrics_of(path)["strict_accuracy"] == 0.0
    assert treegen("score", path).code == 0, "no program has to run"
    assert treegen("score", path, ALLOW, "--rejudge").code == 0
    assert metrics_of(path)["strict_accuracy"] == 0.5


def test_reported_protection_follows_from_the_verdicts(make_run: MakeRun, treegen: Command) -> None:
    _, path = make_run([ADD, "print(3)", " \n"])

    def read_protection() -> dict[str, Any]:
        found: dict[str, Any] = results_of(path)["judging"]
        return {name: found[name] for name in ("sandbox", "unprotected")}

    assert treegen("score", path, ALLOW).code == 0
    before = read_protection()
    assert treegen("score", path).code == 0, "no program has to run"
    assert read_protection() == before
    (file,) = path.glob("verdicts-*.jsonl")
    rows = verdicts_of(path)
    file.write_bytes(b"")
    stored = RecordFile(file, writable=True)
    for tier, row in zip(("bubblewrap", "landlock", ""), rows.values(), strict=True):
        del row["crc"]
        stored.append(row | {"sandbox": tier})
    stored.close()
    for more in ((), (ALLOW,)):
        assert treegen("score", path, *more).code == 0
        found = read_protection()
        assert found["sandbox"] == ["bubblewrap", "landlock"]
        assert list(found["unprotected"]) == ["landlock"]
        assert found["unprotected"]["landlock"]["samples"] == 1
        assert "the host's name can be seen" in found["unprotected"]["landlock"]["gaps"]


def test_verdicts_without_a_sandbox_are_reported(make_run: MakeRun, treegen: Command) -> None:
    _, path = make_run([ADD, "print(3)", " \n"])
    for more in ((ALLOW, "--sandbox", "none"), (ALLOW, "--sandbox", "none")):
        assert treegen("score", path, *more).code == 0
        (gap,) = results_of(path)["judging"]["unprotected"]["none"]["gaps"]
        assert results_of(path)["judging"]["unprotected"]["none"]["samples"] == 2
        assert gap.startswith("everything: ")


def test_another_comparer_has_verdicts_of_its_own(make_run: MakeRun, treegen: Command) -> None:
    _, path = make_run([f"{ADD}\nprint(a + b)", ADD])
    assert treegen("score", path, ALLOW).code == 0
    assert metrics_of(path)["strict_accuracy"] == 0.5
    official = treegen("score", path, ALLOW, "-T", "comparer=apps-official")
    assert official.document["runs"][0]["report"]["metrics"][0]["filter"] == "apps-official"
    assert metrics_of(path)["strict_accuracy"] == 1.0
    assert len(list(path.glob("verdicts-*.jsonl"))) == 2


def test_same_programs_run_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    job, path = make_run([ADD, "print(3)", ADD, ADD, "print(3)"])
    started: list[str] = []
    submit = SandboxScoring._submit

    def counting(self: SandboxScoring, flight: Any) -> None:
        started.append(flight.source)
        submit(self, flight)

    monkeypatch.setattr(SandboxScoring, "_submit", counting)
    assert isinstance(job.task, APPS)
    with RunDir.open(path) as run:
        judging = job.task.open_scoring(run, ExecutionOptions())
        for record in run.records():
            judging.add(record)
        assert judging.missing == 5
        last = list(judging.finish(lambda: None))[-1]
        judging.close()
    assert (last.done, last.planned, last.accuracy) == (5, 5, 0.6)
    assert sorted(set(started)) == sorted({ADD, "print(3)"})
    assert started.count(ADD) == 1
    assert len(verdicts_of(path)) == 5


def test_judge_errors_are_no_scores(make_run: MakeRun) -> None:
    job, path = make_run([ADD, "print(", ADD])
    task = job.task
    assert isinstance(task, APPS)

    def broken(output: str, expected: str) -> bool:
        raise OSError("out of paper")

    task.comparer = Comparer("strict", broken, task.comparer.value, task.comparer.arguments)
    with RunDir.open(path) as run:
        judging = task.open_scoring(run, ExecutionOptions())
        for record in run.records():
            judging.add(record)
        list(judging.finish(lambda: None))
        results, report = write_results(job, run, judging)
        judging.close()
    assert report is not None and (report.num_samples, len(report.incomplete)) == (1, 1)
    assert report.value("compile_error", "strict") == 1.0
    assert judging.missing == results["judging"]["judge_errors"] == 2
    assert "out of paper" in results["judging"]["errors"][0]["detail"]
    assert list(verdicts_of(path)) == [1]


def test_eval_samples_and_judges(tiny: Path, tmp_path: Path, treegen: Command) -> None:
    small = ["--limit", "2", "-n", "3", "--max-tokens", "8", "--memory", "8MiB"]
    path = tmp_path / "run"
    done = treegen("eval", "apps", "--model", tiny, *small, "-o", path, "--allow_code_execution")
    assert done.code == 0, done.err
    assert "sandbox: " in done.err and "strict_accuracy" in done.out
    assert results_of(path)["judging"]["judged"] == 6
    again = treegen("eval", "--resume", path, ALLOW)
    assert again.code == 0 and again.document["runs"][0]["report"] == results_of(path)["report"]
    without = tmp_path / "without"
    done = treegen("eval", "apps", "--model", tiny, *small, "-o", without)
    assert done.code == 1 and f"treegen score {without} {ALLOW}" in done.err.splitlines()[-1]
    assert results_of(without)["report"] is None and results_of(without)["done"] == 6
    quiet = treegen("eval", "--resume", without, "--no-score")
    assert quiet.code == 0, quiet.err
    scored = treegen("score", without, ALLOW)
    assert scored.code == 0
    assert scored.document["runs"][0]["report"] == results_of(path)["report"]


def test_permission_and_its_options_go_together(treegen: Command) -> None:
    done = treegen("eval", "apps", "--model", "x", "--sandbox", "none")
    assert done.error == f"--sandbox has no effect without {ALLOW}; pass both arguments"
    done = treegen("eval", "apps", "--model", "x", "--num-workers", "0", ALLOW)
    assert "--num-workers must be at least 1" in done.error
    done = treegen("eval", "apps", "--model", "x", "--sandbox", "box", ALLOW)
    assert "--sandbox must be one of auto, " in done.error
    done = treegen("eval", "gsm8k", "countdown", "--model", "x", "--sandbox", "none", ALLOW)
    assert "--sandbox has no effect, because gsm8k, countdown run no programs" in done.error
    done = treegen("eval", "gsm8k", "--model", "x", "--num-workers", "2", ALLOW)
    assert "--num-workers has no effect, because gsm8k runs no programs" in done.error
