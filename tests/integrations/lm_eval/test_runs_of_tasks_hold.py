"""Runs of lm-eval's tasks: resumed, with many samples, of groups, and what is refused."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_cases import build_checkpoint, samples_of
from click.testing import CliRunner

pytest.importorskip("lm_eval", "0.4")

import lm_eval_kinds
import lm_eval_tasks
from report_cases import make_run

import treegen
from treegen import LLM
from treegen.api.run import Run, open_run
from treegen.cli.main import cli
from treegen.errors import DataError, InputError
from treegen.evals.registry import code_of, get_task
from treegen.report.compare import compare_runs
from treegen.runs import RunDir
from treegen.tasks import TaskOptions

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), context=1024)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), check=False, **OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = lm_eval_kinds.write_kinds(tmp_path_factory.mktemp("tasks"))
    lm_eval_tasks.write_tasks(found / "more", limit=3)
    return found


def metrics_of(run: Run) -> tuple[Any, ...]:
    assert run.view.report is not None
    return run.view.report.metrics


def kept(path: Path) -> list[dict[str, Any]]:
    """What a run has stored, without what another batch may change in its last digit."""
    return [
        {k: v for k, v in each.items() if not k.endswith(("logprob", "logprobs"))}
        for each in samples_of(path)
    ]


@pytest.mark.parametrize(
    "name", ["local_triviaqa", pytest.param("local_mmlu", marks=pytest.mark.soak)]
)
def test_a_run_that_is_stopped_after_each_sample_ends_the_same(
    name: str, folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling: dict[str, Any] = {}
    if name == "local_triviaqa":
        sampling = {"num_samples": 3, "temperature": 0.9, "max_tokens": 8}
    about: dict[str, Any] = {"include_path": folder, "progress": False, **sampling}
    whole = treegen.evaluate(f"lm-eval:{name}", llm, output=tmp_path / "whole", **about)
    append = RunDir.append

    def once(run: RunDir, *record: Any) -> None:
        append(run, *record)
        raise KeyboardInterrupt

    stopped = 0
    for _ in range(30):
        with monkeypatch.context() as patched:
            patched.setattr(RunDir, "append", once)
            try:
                run = treegen.evaluate(
                    f"lm-eval:{name}", llm, output=tmp_path / "run", resume=True, **about
                )
                break
            except KeyboardInterrupt:
                stopped += 1
    assert stopped == len(kept(tmp_path / "whole")) == (12 if sampling else 8)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    values = [[row.value for row in metrics_of(each)] for each in (run, whole)]
    assert values[0] == pytest.approx(values[1])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_twenty_times_ends_the_same(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        *shlex.split(
            f"-m treegen eval lm-eval:local_gsm8k --include-path {folder} --model {checkpoint}"
            " --dtype float32 --device cpu -n 200 --temperature 1 --max-rows 8 --quiet"
        ),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "-o", str(whole)], check=True, capture_output=True)
    rng = random.Random(20)
    kills = 0
    while kills < 20:
        process = subprocess.Popen(
            [*command, "-o", str(killed), "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = _size(killed)
        while _size(killed) == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    subprocess.run([*command, "-o", str(killed), "--resume"], check=True, capture_output=True)
    assert kills == 20
    assert kept(killed) == kept(whole)
    reports = [
        json.loads((each / "results.json").read_text())["report"] for each in (whole, killed)
    ]
    assert reports[0] == reports[1]


def _size(run: Path) -> int:
    samples = run / "samples.jsonl"
    return samples.stat().st_size if samples.exists() else 0


def test_many_samples_vote_by_filtered_answers_and_score_needs_no_model(
    folder: Path, llm: LLM, tmp_path: Path
) -> None:
    run = treegen.evaluate(
        "lm-eval:local_gsm8k_cot",
        llm,
        output=tmp_path / "run",
        include_path=folder / "more",
        num_samples=6,
        temperature=1.0,
        max_tokens=12,
        progress=False,
        maj_ks=[1, 6],
        pass_ks=[6],
    )
    report = run.view.report
    assert report is not None
    metrics = {(row.metric, row.filter): row.value for row in report.metrics}
    assert ("pass@6", "strict-match") in metrics and ("pass@6", "flexible-extract") in metrics
    assert {(row.filter, row.k) for row in report.majority} == {
        (name, k) for name in ("strict-match", "flexible-extract") for k in (1, 6)
    }
    task = get_task(f"lm-eval:local_gsm8k_cot@{folder / 'more'}")
    right = 0
    data = task.load(TaskOptions())
    known = {problem.id: problem for problem in data.problems}
    for record in samples_of(run.path):
        verdict = task.score(known[record["problem_id"]], record["text"])["flexible-extract"]
        right += verdict.correct
    assert metrics["exact_match", "flexible-extract"] == pytest.approx(right / 18)
    before = json.loads((run.path / "results.json").read_text())["report"]
    arguments = [str(run.path), "--quiet", "--allow-task-code"]
    assert CliRunner().invoke(cli, ["score", *arguments]).exit_code == 0
    assert json.loads((run.path / "results.json").read_text())["report"] == before


def test_filters_over_all_repeats_see_all_samples(folder: Path, llm: LLM, tmp_path: Path) -> None:
    name = "lm-eval:local_gsm8k_cot_self_consistency"
    about: dict[str, Any] = {
        "include_path": folder / "more",
        "max_tokens": 4,
        "temperature": 2.0,
        "progress": False,
    }
    run = treegen.evaluate(name, llm, output=tmp_path / "run", **about)
    assert run.view.num_samples == 8  # the task's own repeats
    rows = {(row.filter, row.metric): row for row in metrics_of(run)}
    assert rows["maj@8", "exact_match"].value is not None
    few = treegen.evaluate(name, llm, output=tmp_path / "few", num_samples=2, **about)
    rows = {(row.filter, row.metric): row for row in metrics_of(few)}
    assert rows["score-first", "exact_match"].value is not None
    missing = rows["maj@8", "exact_match"]
    assert missing.value is None and "8 samples" in str(missing.reason)


def test_samples_stop_when_the_vote_is_decided(folder: Path, llm: LLM, tmp_path: Path) -> None:
    run = treegen.evaluate(
        "lm-eval:local_triviaqa",
        llm,
        output=tmp_path / "run",
        include_path=folder,
        num_samples=40,
        temperature=0.01,
        max_tokens=4,
        stop_when="decided",
        stop_batch=8,
        progress=False,
    )
    assert run.results["complete"] and run.results["done"] < 160


def test_a_group_weighs_by_size_as_it_says(folder: Path, llm: LLM, tmp_path: Path) -> None:
    group = json.loads(
        json.dumps(
            {
                "group": "even",
                "task": ["local_stem", "local_arts"],
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
            }
        )
    )
    (folder / "even.yaml").write_text(json.dumps(group))
    try:
        run = treegen.evaluate(
            str(folder / "even.yaml"), llm, output=tmp_path / "run", progress=False
        )
    finally:
        (folder / "even.yaml").unlink()
    report = run.view.report
    assert report is not None
    values: dict[str, Any] = {row.task: row.value for row in report.metrics}
    assert values["even"] == pytest.approx((values["local_stem"] + values["local_arts"]) / 2)
    assert [row.task for row in report.metrics] == ["even", "local_stem", "local_arts"]


def test_options_of_the_data_are_those_of_lm_eval(folder: Path) -> None:
    task = get_task(f"lm-eval:local_mmlu@{folder}")
    options = TaskOptions
    assert [p.id for p in task.load(options(limit=2)).problems] == [
        "local_stem/0",
        "local_stem/1",
        "local_arts/0",
        "local_arts/1",
    ]
    chosen = ["local_arts/3", "local_stem/1"]
    assert [p.id for p in task.load(options(ids=chosen)).problems] == chosen
    with pytest.raises(InputError, match="set the data"):
        task.load(options(data="x"))
    with pytest.raises(InputError, match="no problem"):
        task.load(options(ids=["local_stem/99"]))


def test_a_stored_run_runs_no_yaml_that_the_reader_does_not_name(
    folder: Path, llm: LLM, tmp_path: Path
) -> None:
    name = f"lm-eval:local_copa@{folder}"
    run = treegen.evaluate(name, llm, output=tmp_path / "run", progress=False)
    notices = open_run(run.path).view.notices
    assert any("the task of the run has code in" in notice for notice in notices)
    assert open_run(run.path, task=name).view.report is not None
    assert open_run(run.path, allow_task_code=True).view.report is not None
    done = CliRunner().invoke(cli, ["score", str(run.path)])
    assert done.exit_code == 2 and "--allow-task-code" in done.output
    assert code_of("lm-eval:gsm8k") is None
    assert code_of("lm-eval:x@there") == "there" and code_of("a/b.yaml") == "a/b.yaml"


def test_an_empty_folder_is_not_the_working_directory(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    run = make_run(tmp_path / "run", num_problems=1, num_samples=1)
    (run / "theirs.yaml").write_text(
        "task: theirs\ndataset_path: json\noutput_type: generate_until\n"
        "doc_to_text: !function theirs.text\ndoc_to_target: x\n"
    )
    (run / "theirs.py").write_text(f"open({str(marker)!r}, 'w')\n")
    document = json.loads((run / "run.json").read_text())
    document["settings"]["free"] |= {"task": "lm-eval:theirs@", "data": None}
    (run / "run.json").write_text(json.dumps(document))
    monkeypatch.chdir(run)
    for command in ("show", "score"):
        done = CliRunner().invoke(cli, [command, "."])
        assert "--allow-task-code" in done.output and not marker.exists()
    with pytest.raises(InputError, match="'' is not a folder"):
        treegen.evaluate("lm-eval:theirs@", llm, output=tmp_path / "new", progress=False)
    assert not marker.exists()


def test_what_cannot_be_run_is_refused_early(folder: Path, tmp_path: Path) -> None:
    for name, message in {
        "lm-eval:local_gsm9k": "no task 'local_gsm9k'",
        "lm-eval:humaneval": "without a sandbox",
        f"lm-eval:x@{tmp_path / 'none'}": "is not a folder",
        str(tmp_path / "none.yaml"): "does not exist",
    }.items():
        with pytest.raises(InputError, match=message):
            get_task(name)
    with pytest.raises(DataError, match=r"openbookqa are not on this machine.* Hub"):
        get_task("lm-eval:openbookqa")
    (tmp_path / "mixed.yaml").write_text(
        json.dumps({"group": "mixed", "task": ["local_gsm8k", "local_piqa"]})
    )
    for each in ("gsm8k", "piqa"):
        (tmp_path / f"{each}.yaml").write_text((folder / f"{each}.yaml").read_text())
    with pytest.raises(InputError, match="lm-eval:local_gsm8k,local_piqa"):
        get_task(str(tmp_path / "mixed.yaml"))


def test_names_in_one_word_are_all_of_lm_eval(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = tmp_path / "run.yaml"
    config.write_text(
        json.dumps(
            {
                "tasks": [str(folder / "piqa.yaml"), "lm-eval:local_copa,local_sciq"],
                "include_path": str(folder),
                "model": str(checkpoint),
                "limit": 1,
                "dtype": "float32",
                "device": "cpu",
            }
        )
    )
    arguments = ["eval", "--quiet", "--config", str(config), "-o", str(out)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    names = ["local_copa", "local_piqa", "local_sciq"]
    assert sorted(each.name for each in out.iterdir()) == [f"lm-eval_{name}" for name in names]
    runs = [open_run(out / f"lm-eval_{name}", allow_task_code=True) for name in names]
    assert all(run.view.report is not None for run in runs)
    for run, metrics in zip(runs, (["acc"], ["acc", "acc_norm"], ["acc", "acc_norm"]), strict=True):
        differences = compare_runs(run.view, run.view).differences
        assert [each.metric for each in differences] == metrics
        assert all(each.value == 0 for each in differences)
    listed = CliRunner().invoke(
        cli, ["tasks", "--lm-eval", "local_", "--include-path", str(folder)]
    )
    assert listed.exit_code == 0 and "local_mmlu" in listed.output


@pytest.mark.soak
def test_the_index_is_lm_evals_own() -> None:
    from lm_eval.tasks._index import TaskIndex

    from treegen.tasks.lm_eval.load import own_folder, own_index

    expected = TaskIndex.build([own_folder()])
    index = own_index()
    assert index.keys() == expected.keys()
    for name, entry in expected.items():
        found = index[name]
        assert (found.kind, found.yaml_path, found.tags) == (
            entry.kind,
            entry.yaml_path,
            entry.tags,
        )


def test_perplexities_have_no_problems_to_compare(folder: Path, llm: LLM, tmp_path: Path) -> None:
    run = treegen.evaluate(
        "lm-eval:local_wikitext", llm, output=tmp_path / "run", include_path=folder, progress=False
    )
    with pytest.raises(InputError, match="has a value from 0 to 1 for each problem"):
        compare_runs(run.view, run.view)
