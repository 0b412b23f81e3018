"""Comparisons of treegen's runs of lm-eval's tasks with logs that lm-eval itself wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import Command, build_checkpoint, write_jsonl
from lm_eval_kinds import folder as folder
from report_cases import make_run

lm_eval = pytest.importorskip("lm_eval", "0.4")

from lm_eval.loggers import EvaluationTracker  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_file_task_name, make_table  # noqa: E402

import treegen  # noqa: E402
from treegen import LLM  # noqa: E402
from treegen.api.run import Run  # noqa: E402
from treegen.errors import InputError  # noqa: E402
from treegen.integrations.lm_eval import TreegenLM  # noqa: E402
from treegen.report.compare import Comparison  # noqa: E402
from treegen.report.exchange import export_run, import_log  # noqa: E402
from treegen.report.lm_eval_documents import describe_document, dump_document  # noqa: E402

GENERATED, CHOSEN = "local_triviaqa", "local_arc_easy"


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each task, treegen's run and the imported log of lm-eval, by one model."""
    where = tmp_path_factory.mktemp("runs")
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("model"), context=1024)
    with LLM(str(checkpoint), check=False, device="cpu", dtype="float32", memory="64MiB") as llm:
        for name in (GENERATED, CHOSEN):
            treegen.evaluate(
                f"lm-eval:{name}",
                llm,
                output=where / name,
                include_path=folder,
                progress=False,
            )
        tracker = EvaluationTracker(output_path=str(where / "log"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
            found = lm_eval.simple_evaluate(
                model=TreegenLM(llm),
                tasks=[GENERATED, CHOSEN],
                task_manager=TaskManager(include_path=str(folder), include_defaults=False),
                log_samples=True,
                evaluation_tracker=tracker,
                bootstrap_iters=0,
            )
    samples: dict[str, Any] = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    imported = import_log(where / "log", where / "imported")
    return {path.name: (where / path.name, path) for path in imported}


def open_both(paths: tuple[Path, Path]) -> tuple[Run, Run]:
    run, log = (treegen.open_run(path, allow_task_code=True) for path in paths)
    return run, log


def values(comparison: Comparison) -> dict[tuple[str, str], tuple[float, float]]:
    return {(row.filter, row.metric): (row.a, row.b) for row in comparison.differences}


@pytest.mark.parametrize("name", [GENERATED, CHOSEN])
def test_metrics_of_a_log_are_compared_with_those_of_the_same_task(
    name: str, runs: dict[str, tuple[Path, Path]]
) -> None:
    run, log = open_both(runs[name])
    there, back = run.compare(log), log.compare(run)
    assert there.problem_ids == tuple(run.view.info.problem_ids) and not there.left_out
    assert values(back) == {key: (b, a) for key, (a, b) in values(there).items()}
    assert run.view.report is not None
    for (filter, metric), (a, b) in values(there).items():
        assert a == b == run.view.report.value(metric, filter)
    metrics = {metric for _, metric in values(there)}
    assert metrics == ({"exact_match"} if name == GENERATED else {"acc", "acc_norm"})
    if name == GENERATED:
        assert there.num_equal == there.num_paired == len(there.problem_ids)
    assert there.tokens is None  # lm-eval does not count them
    differ_in = {setting.split()[0] for setting in there.differ_in}
    assert differ_in <= {"model", "max_tokens", "temperature"}


def test_command_compares_a_log_with_a_run(
    runs: dict[str, tuple[Path, Path]], treegen: Command, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    run, log = runs[GENERATED]
    done = treegen("compare", log, run, "--no-plots", "--allow-task-code", "--html", page)
    assert done.code == 0, done.err
    assert "< 0.05): no difference is shown" in done.out
    assert page.stat().st_size and done.document["page"] == str(page)


def logged_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"*/samples_{name}_*.jsonl")
    assert get_file_task_name(path.name) == name
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [GENERATED, CHOSEN])
def test_an_exported_run_has_the_lines_that_lm_eval_writes(
    name: str, runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    run, _ = runs[name]
    results, _ = export_run(run, "lm-eval", tmp_path, allow_task_code=True)
    rows = logged_rows(tmp_path, name)
    expected = logged_rows(run.parent / "log", name)
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        added = row.keys() - other.keys()
        assert added == {"problem_id", *(["by_response"] if name == GENERATED else [])}
        assert other.keys() <= row.keys()
        if name == CHOSEN:  # the tree and the batch of a prompt change its last bits
            for field in ("resps", "filtered_resps"):
                for mine, its in zip(row.pop(field), other.pop(field), strict=True):
                    (logprob, greedy), (its_logprob, its_greedy) = (
                        (mine[0], its[0]) if field == "resps" else (mine, its)
                    )
                    assert float(logprob) == pytest.approx(float(its_logprob), abs=1e-4)
                    assert greedy == its_greedy
        assert {key: row[key] for key in other} == other
    document = json.loads(results.read_text())
    logged = json.loads(next((run.parent / "log").glob("*/results_*.json")).read_text())
    for field in ("versions", "n-shot", "n-samples", "task_hashes"):
        assert document[field] == {name: logged[field][name]}, field
    assert (
        document["configs"][name].items()
        >= {
            key: logged["configs"][name][key] for key in ("task", "output_type", "doc_to_text")
        }.items()
    )
    for key, value in logged["results"][name].items():
        if not key.startswith("alias") and "_stderr" not in key:
            assert document["results"][name][key] == value
    assert name in make_table(document)


def test_a_group_is_exported_as_its_tasks(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    group = {"group": "local_both", "task": [CHOSEN, "local_piqa"]}
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / "tasks" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tasks" / "both.yaml").write_text(json.dumps(group))
    checkpoint = build_checkpoint(tmp_path / "model", context=1024)
    with LLM(str(checkpoint), check=False, device="cpu", dtype="float32", memory="64MiB") as llm:
        run = treegen.evaluate(
            "lm-eval:local_both",
            llm,
            output=tmp_path / "run",
            include_path=tmp_path / "tasks",
            progress=False,
        )
    results, *samples = export_run(run.path, "lm-eval", tmp_path / "log", allow_task_code=True)
    names = [CHOSEN, "local_piqa"]
    assert [get_file_task_name(path.name) for path in samples] == names
    document = json.loads(results.read_text())
    assert document["group_subtasks"] == {"local_both": names}
    assert list(document["configs"]) == names
    imported = import_log(results, tmp_path / "imported")
    assert [path.name for path in imported] == names
    report = run.view.report
    assert report is not None
    for row in report.metrics:
        value = document["results"][row.task][f"{row.metric},{row.filter}"]
        assert value == row.value
    aggregate, rows = export_run(
        run.path, "every-eval-ever", tmp_path / "shared", allow_task_code=True
    )
    scores = json.loads(aggregate.read_text())["evaluation_results"]
    ids = {score["evaluation_result_id"]: score["evaluation_name"] for score in scores}
    assert len(ids) == len(scores) and set(names) <= set(ids.values())
    sizes = {
        name: json.loads(results.read_text())["n-samples"][name]["effective"] for name in names
    }
    for score in scores:
        num_problems = score["score_details"]["uncertainty"]["num_samples"]
        assert num_problems == sizes.get(score["evaluation_name"], sum(sizes.values()))
    for line in rows.read_text().splitlines():
        document = json.loads(line)
        task = document["sample_id"].partition("/")[0]
        assert document["evaluation_name"] == ids[document["evaluation_result_id"]] == task


def test_an_exported_run_is_compared_with_its_origin(
    runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    for name, (run, _) in runs.items():
        files = export_run(run, "lm-eval", tmp_path / name, allow_task_code=True)
        (back,) = import_log(files[0], tmp_path / f"back-{name}")
        comparison = treegen.open_run(run, allow_task_code=True).compare(back)
        assert values(comparison) and all(a == b for a, b in values(comparison).values())


def test_logs_of_other_documents_are_not_compared(
    runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    (results,) = (runs[GENERATED][0].parent / "log").glob("*/results_*.json")
    stamp = results.stem.removeprefix("results_")

    def change(row: dict[str, Any], name: str) -> None:
        if name == GENERATED:
            row["arguments"]["gen_args_0"]["arg_0"] = "Q: another question\nA:"
        else:
            row["doc"]["question"] = "another question"

    for name in (GENERATED, CHOSEN):
        file = f"samples_{name}_{stamp}.jsonl"
        rows = list(map(json.loads, results.with_name(file).read_text().splitlines()))
        for row in rows:
            change(row, name)
        changed = tmp_path / f"changed-{name}"
        changed.mkdir()
        (changed / results.name).write_text(results.read_text())
        write_jsonl(changed / file, rows)
        (log,) = import_log(changed, tmp_path / name, tasks=[name])
        run = treegen.open_run(runs[name][0], allow_task_code=True)
        with pytest.raises(InputError, match="have the same ids but different content"):
            run.compare(log)


def test_a_run_whose_code_is_not_allowed_is_told(runs: dict[str, tuple[Path, Path]]) -> None:
    run, log = runs[GENERATED]
    why = r"cannot be compared: the problems cannot be read.* or allow_task_code=True"
    with pytest.raises(InputError, match=why):
        treegen.open_run(run).compare(log)


def test_documents_may_have_values_that_json_lacks() -> None:
    doc = {"a": "\ud800", "b": {1}, "c": b"\xff", "d": np.float32(0.5), "e": np.int8(3)}
    text = dump_document(doc)
    assert text.encode() and json.loads(text) == {
        "a": "?",
        "b": [1],
        "c": "b'\\xff'",
        "d": 0.5,
        "e": 3,
    }
    assert describe_document(["x"]) == "['x']"


_CODE = """
import datasets

def load(**options):
    rows = [
        {"text": f"word {number} \\u2028", "word": "x", "raw": b"\\xff", "tags": {"a": None}}
        for number in range(2)
    ]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})

def measure(doc, results):
    share = 0.25 + len(results[0]) % 2 / 2
    return {"pair": (doc["word"], results[0]), "errors": share, "loss": 3.0, "f1": 1 - share}

def aggregate(pairs):
    return float(len(pairs))
"""
_METRICS = {"pair": True, "errors": False, "loss": False, "f1": True}


@pytest.mark.parametrize("num_samples", [1, 3])
def test_an_exported_run_has_all_metrics_of_its_task(num_samples: int, tmp_path: Path) -> None:
    """Metrics may be below 1, better if lower, or no numbers, and documents may have any type."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "odd.py").write_text(_CODE)
    metrics = "".join(
        f"  - metric: {name}\n    higher_is_better: {json.dumps(better)}\n    aggregation: "
        f"{'!function odd.aggregate' if name == 'pair' else 'mean'}\n"
        for name, better in _METRICS.items()
    )
    take = [{"function": "take_first"}]
    (tmp_path / "tasks" / "odd.yaml").write_text(
        "task: odd\ncustom_dataset: !function odd.load\ntest_split: test\n"
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: word\n'
        "process_results: !function odd.measure\n"
        'generation_kwargs: {until: ["\\n"], do_sample: true, temperature: 1.0, max_gen_toks: 8}\n'
        f"filter_list: {json.dumps([{'name': 'first', 'filter': take}])}\n"
        f"metric_list:\n{metrics}metadata: {{version: 1.10}}\n"
    )
    checkpoint = build_checkpoint(tmp_path / "model", context=1024)
    with LLM(str(checkpoint), check=False, device="cpu", dtype="float32", memory="64MiB") as llm:
        run = treegen.evaluate(
            "lm-eval:odd",
            llm,
            output=tmp_path / "run",
            include_path=tmp_path / "tasks",
            num_samples=num_samples,
            progress=False,
        )
    results, samples = export_run(run.path, "lm-eval", tmp_path / "log", allow_task_code=True)
    with samples.open(encoding="utf-8") as file:
        rows = list(map(json.loads, file))
    assert rows[1]["doc"] == {
        "text": "word 1 \u2028",
        "word": "x",
        "raw": "b'\\xff'",
        "tags": {"a": None},
    }
    for row in rows:
        # Pairs have no mean.
        assert row["metrics"] == [name for name in _METRICS if num_samples == 1 or name != "pair"]
        shares = [each["metrics"]["f1"] for each in row["by_response"]]
        assert 0 < row["f1"] == sum(shares) / num_samples < 1 and row["loss"] == 3
    (back,) = import_log(results, tmp_path / "back")
    comparison = treegen.open_run(run.path, allow_task_code=True).compare(back)
    found = values(comparison)
    assert {metric for _, metric in found} >= {"errors", "f1"}
    assert all(a == b for a, b in found.values())


def test_another_task_than_that_of_the_log_is_told(
    runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    own = treegen.open_run(make_run(tmp_path / "own", num_problems=2, num_samples=1))
    with pytest.raises(InputError, match=f"make the run with the task lm-eval:{GENERATED} and"):
        own.compare(runs[GENERATED][1])
